"""Compare every kind of task with stock lm-eval: equal in every bit."""

import json
from pathlib import Path

import pytest

from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.harness.lm_eval.results import _line, merge, plain
from holdfast.evaluate.types.harness import AnsweredSample
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.testing.local_client import LocalClient

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own

BOOTSTRAP = 200


@pytest.fixture(scope="module")
def lm_eval_harness(world):
    made = harness("lm-eval", include_paths=[str(world.tasks)])
    made.prepare([TaskEntry(name="t_choice")])
    return made


@pytest.fixture(scope="module")
def stock(world):
    """Return stock lm-eval's results and samples of an entry, in the form of its files."""
    import torch
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, sanitize_list

    torch.set_num_threads(1)  # as the engine has
    manager = TaskManager(include_path=str(world.tasks), include_defaults=False)

    def run(entries):
        if isinstance(entries, TaskEntry):
            entries = [entries]
        entry = entries[0]
        results = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(world.model)},
            tasks=[entry.name for entry in entries],
            num_fewshot=entry.num_fewshot,
            batch_size=1,
            device="cpu",
            limit=entry.limit if entry.limit is None or entry.limit < 1 else int(entry.limit),
            bootstrap_iters=BOOTSTRAP,
            system_instruction=entry.system_instruction,
            apply_chat_template=entry.chat_template,
            task_manager=manager,
        )
        samples = {
            task: plain([_line(row, sanitize_list) for row in rows], handle_non_serializable)
            for task, rows in results.pop("samples").items()
        }
        return plain(results, handle_non_serializable), samples

    return run


def read_samples(folder: Path, result) -> dict[str, list]:
    place = folder / result.samples_file
    paths = [place] if place.is_file() else sorted(place.glob("*.jsonl"))
    from lm_eval.utils import get_file_task_name

    return {
        get_file_task_name(path.name): [json.loads(line) for line in path.open()] for path in paths
    }


PARTS = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)

ENTRIES = [
    TaskEntry(name="t_choice"),
    TaskEntry(name="t_choice", chat_template=True, system_instruction="Think."),
    TaskEntry(name="t_mutual"),
    TaskEntry(name="t_shots"),
    TaskEntry(name="t_shots", limit=4, num_fewshot=1),
    TaskEntry(name="t_shots", chat_template=True),
    TaskEntry(name="t_inputs"),
    TaskEntry(name="t_score"),
    TaskEntry(name="t_rolling"),
    TaskEntry(name="t_generate"),
    TaskEntry(name="t_generate", chat_template=True, limit=0.5),
    TaskEntry(name="t_long"),
    TaskEntry(name="t_votes"),
    TaskEntry(name="t_own"),
    TaskEntry(name="t_several"),
    TaskEntry(name="t_group"),
    TaskEntry(name="t_choices"),
]


@pytest.mark.parametrize(
    "entry", ENTRIES, ids=lambda entry: f"{entry.name}-{entry.limit}-{entry.chat_template}"
)
def test_results_and_samples_are_those_of_stock_lm_eval(
    entry, world, lm_eval_harness, stock, tmp_path
):
    ours = TaskEntry(**{**_fields(entry), "options": {"bootstrap_iters": BOOTSTRAP}})
    client = LocalClient(world.engine(seed=5), world.facts, lm_eval_harness, ours)
    result = lm_eval_harness.run(ours, client, tmp_path)
    expected, samples = stock(entry)
    assert {part: result.results.get(part) for part in PARTS} == {
        part: expected.get(part) for part in PARTS
    }
    assert read_samples(tmp_path, result) == samples


def _fields(entry: TaskEntry) -> dict:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def test_entries_merged_are_stock_lm_eval_over_all_of_them_at_once(
    world, lm_eval_harness, stock, tmp_path
):
    from lm_eval.utils import make_table

    entries = [
        TaskEntry(name=name, options={"bootstrap_iters": BOOTSTRAP})
        for name in ("t_score", "t_group", "t_votes", "t_rolling")
    ]
    engine = world.engine()
    results = [
        lm_eval_harness.run(
            entry, LocalClient(engine, world.facts, lm_eval_harness, entry), tmp_path
        ).results
        for entry in entries
    ]
    merged = merge(results, model_name="tiny/llama", start_s=1.0, end_s=4.0)
    expected, _samples = stock(entries)
    for part in PARTS:
        assert merged[part] == expected[part], part
        assert list(merged[part]) == list(expected[part]), part
    assert make_table(merged) == make_table(expected)
    assert make_table(merged, "groups") == make_table(expected, "groups")
    assert merged["config"]["model"] == "tiny/llama"
    assert merged["model_name_sanitized"] == "tiny__llama"
    assert merged["total_evaluation_time_seconds"] == "3.0"
    same = expected.keys() - {
        "pretty_env_info",
        "configs",
        "config",
        "date",
        "git_hash",
        "upper_git_hash",
    }
    assert {key: merged[key] for key in same} == {key: expected[key] for key in same}


def test_all_types_of_requests_are_asked_at_once_grouped_by_document(
    world, lm_eval_harness, tmp_path
):
    client = Noting(world.engine(), world.facts)
    entry = TaskEntry(name="t_group", options={"bootstrap_iters": 0})
    lm_eval_harness.run(entry, client, tmp_path)
    (samples,) = client.asked
    assert [sample.sample for sample in samples] == list(range(18))  # three tasks of six documents
    kinds = [[request.kind for request in sample.requests] for sample in samples]
    assert kinds == [["loglikelihood"] * 3] * 12 + [["generate"]] * 6


def test_what_is_sampled_is_asked_once_a_repeat_and_what_is_not_once(
    world, lm_eval_harness, tmp_path
):
    client = Noting(world.engine(), world.facts)
    lm_eval_harness.run(TaskEntry(name="t_sampled"), client, tmp_path)
    for sample in client.asked[0]:
        assert [request.sampling.repeat for request in sample.requests] == [0, 1]
        assert {
            (request.sampling.temperature, request.sampling.seed) for request in sample.requests
        } == {(0.8, 1234)}
    client = Noting(world.engine(), world.facts)
    lm_eval_harness.run(TaskEntry(name="t_votes"), client, tmp_path)
    for sample in client.asked[0]:
        assert len(sample.requests) == 3
        assert len(set(map(repr, sample.requests))) == 1


def test_a_task_that_raises_in_its_metric_raises_in_the_client(world, lm_eval_harness, tmp_path):
    entry = TaskEntry(name="t_raising")
    client = LocalClient(world.engine(), world.facts, lm_eval_harness, entry)
    with pytest.raises(ZeroDivisionError, match="cannot score"):
        lm_eval_harness.run(entry, client, tmp_path)


class Noting(LocalClient):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.asked: list = []

    def ask(self, samples) -> list[AnsweredSample]:
        self.asked.append(samples)
        return super().ask(samples)
