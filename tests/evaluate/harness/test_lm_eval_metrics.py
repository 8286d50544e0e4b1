"""Check that a metric computed elsewhere is used for exactly the same inputs only."""

import sys
import types

import pytest
from bench_world import make_code_task
from msgspec import structs

from holdfast.core.errors import BadUse
from holdfast.evaluate.harness import exact_json
from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.testing.local_client import LocalClient

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own

FAST = {"bootstrap_iters": 0}


@pytest.fixture
def lm_eval_harness(world):
    made = harness("lm-eval", include_paths=[str(world.tasks)])
    made.prepare([TaskEntry(name="t_own")])
    return made


class Changing(LocalClient):
    """Pass on changed results of `measure`, and record the metric keys."""

    def __init__(self, *args, change=lambda measured: measured) -> None:
        super().__init__(*args)
        self._change = change
        self.keys: list[bytes] = []

    def ask(self, samples):
        self.keys = [sample.metric_key for sample in samples]
        return [
            structs.replace(sample, measured=self._change(sample.measured))
            for sample in super().ask(samples)
        ]


def with_values(change):
    """Return `measured`, with the value of each filter changed."""

    def changed(measured: bytes) -> bytes:
        return exact_json.encode(
            [
                [doc, asked, change(value), grown]
                for doc, asked, value, grown in exact_json.decode(measured)
            ]
        )

    return changed


def computed_by_the_client(*args):
    return Changing(*args, change=lambda _measured: b"")


def scores(made, world, folder, name, client=LocalClient, **options):
    entry = TaskEntry(name=name, options={**FAST, **options})
    used = client(world.engine(), world.facts, made, entry)
    return made.run(entry, used, folder).results["results"][name], used


def test_what_was_measured_for_the_same_answers_is_what_is_scored(world, lm_eval_harness, tmp_path):
    forged = with_values(lambda _value: {"length": 1000, "overlap": 0.5})
    row, _ = scores(
        lm_eval_harness, world, tmp_path, "t_own", lambda *args: Changing(*args, change=forged)
    )
    assert row["length,none"] == 1000  # taken, so the client did not compute it


@pytest.mark.parametrize(
    "change",
    [
        lambda _measured: b"",
        lambda measured: exact_json.encode(
            [["0" * 32, *row[1:]] for row in exact_json.decode(measured)]
        ),
        lambda measured: exact_json.encode(
            [
                [row[0], "0" * 32, {"length": 1000, "overlap": 0.5}, {}]
                for row in exact_json.decode(measured)
            ]
        ),
    ],
    ids=["nothing", "another document", "other answers"],
)
def test_what_was_not_measured_for_this_is_computed_by_the_harness(
    change, world, lm_eval_harness, tmp_path
):
    expected, _ = scores(lm_eval_harness, world, tmp_path, "t_own", computed_by_the_client)
    row, _ = scores(
        lm_eval_harness, world, tmp_path, "t_own", lambda *args: Changing(*args, change=change)
    )
    assert row == expected
    assert row["length,none"] != 1000


def test_a_metric_that_names_itself_several_ways_keeps_its_aggregation(
    world, lm_eval_harness, tmp_path
):
    calls = []
    expected, _ = scores(lm_eval_harness, world, tmp_path, "t_several", computed_by_the_client)
    row, _ = scores(
        lm_eval_harness,
        world,
        tmp_path,
        "t_several",
        lambda *args: Changing(*args, change=lambda measured: calls.append(measured) or measured),
    )
    assert row == expected
    assert all(calls)
    (_doc, _asked, value, grown), *_ = exact_json.decode(calls[0])
    assert list(value) == ["part@1", "part@2"]
    assert grown == {"part@1": ("several", True), "part@2": ("several", True)}


def test_only_what_may_take_long_is_measured_elsewhere(world, lm_eval_harness, tmp_path):
    for name, is_streamed in {
        "t_choice": False,
        "t_generate": False,
        "t_own": True,
        "t_several": True,
    }.items():
        _, client = scores(lm_eval_harness, world, tmp_path, name, Changing)
        assert {bool(key) for key in client.keys} == {is_streamed}, name


def test_the_key_stands_for_task_document_requests_and_how_tokens_become_text(
    world, lm_eval_harness, tmp_path
):
    def keys(made=lm_eval_harness, **options):
        return scores(made, world, tmp_path, "t_own", Changing, **options)[1].keys

    first = keys()
    assert keys() == first
    assert len(set(first)) == len(first)
    assert not set(first) & set(keys(gen_kwargs={"max_gen_toks": 5}))
    assert not set(first) & set(keys(model_args={"think_end_token": "a"}))


def test_a_metric_that_raises_is_left_to_the_client(world, lm_eval_harness):
    entry = TaskEntry(name="t_raising")
    engine = world.engine()
    from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens

    answer = engine.answer(
        Request(kind="generate", prompt=pack_tokens([7]), sampling=Sampling(max_new_tokens=2))
    )
    assert lm_eval_harness.measure(entry, 0, [answer], world.facts) == b""


@pytest.fixture
def sandbox(monkeypatch):
    """Replace the sandbox by one that records its inputs and passes every other program."""
    calls = []

    def pass_at_k(references, predictions, k):
        calls.append((references, predictions, tuple(k)))
        return {f"pass@{one}": (len(predictions[0][0]) % 2) * 1.0 for one in k}, {}

    module = types.ModuleType("holdfast.evaluate.metrics.code_eval")
    module.pass_at_k = pass_at_k
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.slow
def test_code_runs_in_the_sandbox_once_confirmed(world, sandbox, tmp_path):
    make_code_task(world.tasks, marked=True)
    made = harness("lm-eval", include_paths=[str(world.tasks)], confirm_unsafe_code=True)
    made.prepare([TaskEntry(name="t_code")])
    row, client = scores(made, world, tmp_path, "t_code", Changing)
    assert all(client.keys)
    assert {"pass@1,code", "pass@2,code"} < row.keys()
    assert len(sandbox) == 6  # by `measure` alone, once a document
    _references, predictions, k = sandbox[0]
    assert (len(predictions[0]), k) == (2, (1, 2))


@pytest.mark.slow
def test_code_is_refused_unless_confirmed(world, sandbox, tmp_path):
    make_code_task(world.tasks, marked=True)
    make_code_task(world.tasks, marked=False)
    made = harness("lm-eval", include_paths=[str(world.tasks)])
    with pytest.raises(
        BadUse, match=r"runs code that the model writes.*confirm_unsafe_code = true"
    ):
        made.prepare([TaskEntry(name="t_code")])
    made.prepare([TaskEntry(name="t_code_unmarked")])
    sys.modules.pop(str(world.tasks / "code_utils"), None)
    with pytest.raises(BadUse, match="confirm_unsafe_code = true"):
        scores(made, world, tmp_path, "t_code_unmarked")
    assert not sandbox
