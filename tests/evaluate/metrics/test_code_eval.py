"""Compare pass@k with Hugging Face's code_eval."""

import itertools

import numpy as np
import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.code_eval import CodeEval, pass_at_k
from holdfast.evaluate.metrics.sandbox.sandbox import Sandbox


def test_the_example_of_its_documentation(sandbox: Sandbox) -> None:
    scores, results = pass_at_k(
        ["assert add(2,3)==5"],
        [["def add(a,b): return a*b", "def add(a, b): return a+b"]],
        [1, 2],
        sandbox=sandbox,
    )
    assert scores == {"pass@1": 0.5, "pass@2": 1.0}
    assert results == {
        0: [
            (
                0,
                {
                    "task_id": 0,
                    "passed": False,
                    "result": "failed: AssertionError",
                    "completion_id": 0,
                },
            ),
            (1, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 1}),
        ]
    }


def test_equals_exact_combinatorics(sandbox: Sandbox) -> None:
    right, wrong = "def f(): return 1", "def f(): return 2"
    predictions = [[right] * correct + [wrong] * (4 - correct) for correct in range(5)]
    scores, results = pass_at_k(
        ["assert f() == 1"] * 5, predictions, (1, 2, 3, 4, 5), sandbox=sandbox
    )
    assert list(scores) == ["pass@1", "pass@2", "pass@3", "pass@4"]
    for k in range(1, 5):
        draws = [
            any(draw)
            for correct in range(5)
            for draw in itertools.combinations([n < correct for n in range(4)], k)
        ]
        assert scores[f"pass@{k}"] == pytest.approx(np.mean(draws), abs=1e-12)
    assert [sum(outcome["passed"] for _, outcome in results[task]) for task in range(5)] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_is_a_drop_in() -> None:
    scores, _ = CodeEval().compute(
        references=["assert add(2, 3)==5"], predictions=[["def add(a,b): return a*b"]], k=[1]
    )
    assert scores == {"pass@1": 0.0}


def test_refuses_lists_of_unequal_length() -> None:
    with pytest.raises(BadUse, match="1 references for 0 lists"):
        pass_at_k(["assert True"], [])
