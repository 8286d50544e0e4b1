"""Compute Hugging Face's `code_eval` metric, with every program run in the sandbox.

The metric is pass@k of Chen et al. 2021, "Evaluating Large Language Models Trained on Code". For n
programs of which c pass, it is the unbiased estimator 1 - C(n - c, k) / C(n, k). The estimator is
computed in numpy as Hugging Face computes it, so that the result is equal bit for bit.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.sandbox.sandbox import MAX_SLOTS, Sandbox

Results = dict[int, list[tuple[int, dict[str, Any]]]]


def pass_at_k(
    references: Sequence[str],
    predictions: Sequence[Sequence[str]],
    k: Iterable[int] = (1, 10, 100),
    num_workers: int = 4,
    timeout: float = 3.0,
    *,
    sandbox: Sandbox | None = None,
) -> tuple[dict[str, float], Results]:
    """Compute pass@k, and the outcome of each program.

    Args:
        references: the source of the tests of each problem.
        predictions: the sources of the programs for each problem, each with prompt and completion.
        k: the values of k; a value that exceeds some problem's number of programs is left out.
        num_workers: the number of programs that run at the same time; only used without `sandbox`.
        timeout: the seconds that each program may take.
        sandbox: the sandbox; None to use a sandbox of this process, which later calls use again.

    Returns:
        `{"pass@k": share}`; and for the index of each problem, a list of pairs of a program's index
        and its outcome {"task_id", "passed", "result", "completion_id"}.

    Raises:
        BadUse: the lists differ in length, or this machine cannot run a sandbox.
        EvaluationError: the sandbox failed.
    """
    if len(references) != len(predictions):
        raise BadUse(
            f"There are {len(references)} references for {len(predictions)} lists of predictions; "
            "give as many."
        )
    box = sandbox or _own_sandbox(num_workers)
    numbered = [
        (task, completion, program, tests)
        for task, (programs, tests) in enumerate(zip(predictions, references, strict=True))
        for completion, program in enumerate(programs)
    ]

    def run(each: tuple[int, int, str, str]) -> dict[str, Any]:
        task, completion, program, tests = each
        verdict = box.run(program, tests, wall_s=timeout)
        return {
            "task_id": task,
            "passed": verdict.passed,
            "result": verdict.reason,
            "completion_id": completion,
        }

    results: Results = {}
    with ThreadPoolExecutor(max_workers=num_workers) as threads:
        for outcome in threads.map(run, numbered):
            results.setdefault(outcome["task_id"], []).append((outcome["completion_id"], outcome))
    return _estimates(results, k), results


def _estimates(results: Results, ks: Iterable[int]) -> dict[str, float]:
    import numpy as np

    total = np.array([len(outcomes) for outcomes in results.values()])
    correct = [sum(outcome["passed"] for _, outcome in outcomes) for outcomes in results.values()]

    def estimate(n: int, c: int, k: int) -> float:
        return 1.0 if n - c < k else float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    return {
        f"pass@{k}": np.array(
            [estimate(int(n), int(c), k) for n, c in zip(total, correct, strict=True)]
        ).mean()
        for k in ks
        if (total >= k).all()
    }


class CodeEval:
    """Stand in for the metric that `evaluate.load("code_eval")` returns."""

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], **options: Any
    ) -> tuple[dict[str, float], Results]:
        """See `pass_at_k`."""
        return pass_at_k(references, predictions, **options)


_sandboxes: dict[int, Sandbox] = {}


def _own_sandbox(slots: int) -> Sandbox:
    """Return the sandbox of this process; a forked process starts a sandbox of its own."""
    if os.getpid() not in _sandboxes:
        _sandboxes.clear()
        _sandboxes[os.getpid()] = Sandbox(min(slots, MAX_SLOTS))
    return _sandboxes[os.getpid()]
