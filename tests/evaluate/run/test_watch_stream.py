"""Check the checkpoints of a stream in progress, and the choice of the next."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.catalog.annotations import LOCK_NAME, Annotations, read_marks
from holdfast.core.errors import BadUse, CheckpointError
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import EvaluationRecord
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.policy.priors import TaskHistory, encode_history
from holdfast.evaluate.run import watch
from holdfast.evaluate.run.checkpoint_annotations import note_scores
from holdfast.evaluate.run.ledger import history_of, record_end
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import describe_model
from holdfast.evaluate.types.evaluation import Evaluation, read_evaluation
from holdfast.evaluate.types.scores import Score
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.wire.messages import ModelOutcome, TaskOutcome


class Fed:
    """A stream whose session only records its steps."""

    def __init__(self, tmp_path, ledger, monkeypatch, **options):
        self.folder, self.steps = tmp_path / "checkpoints", []
        self.folder.mkdir()
        paths = EvaluationPaths(tmp_path / "home", "a-stream")
        suite = Suite(name="suite", entries=(TaskEntry(name="task"),))
        self.stream = watch._Stream(
            suite,
            self.folder,
            EvaluateOptions(home=tmp_path / "home", **options),
            paths,
            ledger,
            None,
            {},
        )
        session = SimpleNamespace(
            add=lambda added: self.steps.append(int(added.name.rsplit("-", 1)[1]))
        )
        monkeypatch.setattr(watch._Stream, "_start", lambda _self, _first: session)
        self.wrong = {}
        monkeypatch.setattr(watch, "describe_model", self.describe)

    def describe(self, model, _options):
        """Raise the error in `wrong` for a step, if any."""
        if error := self.wrong.get(int(model.rsplit("-", 1)[1])):
            raise error

    def commit(self, *steps):
        for step in steps:
            (self.folder / f"checkpoint-{step}").mkdir()
            (self.folder / f"checkpoint-{step}" / "trainer_state.json").touch()

    def feed(self):
        """Return the steps that are new to the session."""
        before = len(self.steps)
        self.stream._feed()
        return self.steps[before:]

    def evaluations(self):
        """Return the evaluations that failed before they began."""
        self.stream._heard.put(None)
        return list(self.stream.evaluations(once=False, until=None))

    def ended(self, number, **said):
        """End a model; return the evaluations like `evaluations`."""
        self.stream._open.discard(number)
        return list(self.stream._ended(ModelOutcome(model=number, **said)))

    def states(self):
        return {record.step: record.state for record in self.stream.ledger.evaluations()}

    def close(self):
        for held in self.stream._holding.values():
            held.close()


@pytest.fixture
def fed(tmp_path, monkeypatch):
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    made = []

    def make(**options):
        made.append(Fed(tmp_path, ledger, monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    ledger.close()


def test_two_are_under_way_and_the_newest_comes_next(fed):
    fed = fed()
    fed.commit(1, 2, 3)
    assert fed.feed() == [3, 2]
    fed.commit(4)
    assert fed.feed() == []
    fed.stream._open.discard(0)
    assert fed.feed() == [4]


def test_a_newer_one_replaces_those_that_wait_where_stale_ones_are_dropped(fed):
    fed = fed(drop_stale=True)
    fed.commit(1, 2)
    assert fed.feed() == [2]
    fed.commit(3)
    assert fed.feed() == [3]
    fed.commit(4)
    assert fed.feed() == [4], "the coordinator ends what is not begun"
    assert fed.feed() == []


def test_one_that_was_committed_late_drops_no_newer_one(fed):
    fed = fed(drop_stale=True)
    fed.commit(5)
    assert fed.feed() == [5]
    fed.commit(4)
    assert fed.feed() == []


def test_what_the_session_has_learned_so_far_is_recorded_with_each_checkpoint(fed, tmp_path):
    """For evaluations that start during the stream."""
    fed = fed()
    fed.commit(1)
    fed.feed()
    plan, paths = fed.stream._plans[0]
    history = [
        TaskHistory(task="lm-eval:task", numbers=bytes(4), new_tokens=bytes(4), metric_s=bytes(4))
    ]
    learned = CoordinatorFiles(fed.stream.paths.root).learned
    learned.parent.mkdir(parents=True, exist_ok=True)
    learned.write_bytes(encode_history(history))
    ended = Evaluation(
        id=paths.evaluation_id,
        model=plan.model,
        suite="suite",
        state="done",
        folder=paths.root,
        scores=(),
    )
    record_end(fed.stream.ledger, plan, fed.stream.paths, ended)
    assert history_of(fed.stream.ledger, plan) == history


@pytest.mark.parametrize(
    "error", [CheckpointError("It is torn."), BadUse("It is torn."), OSError(13, "It is torn.")]
)
def test_a_checkpoint_that_cannot_be_read_has_failed_once_and_older_ones_are_evaluated(fed, error):
    fed = fed()
    fed.wrong[3] = error
    fed.commit(1, 2, 3)
    (failed,) = fed.evaluations()
    assert fed.steps == [2, 1]
    assert (failed.state, failed.step, list(failed.errors)) == ("failed", 3, ["task"])
    assert "It is torn." in failed.errors["task"]
    assert failed.model == str(fed.folder / "checkpoint-3")
    assert failed.started_at_s > 0
    assert read_evaluation(Path(failed.folder)).errors == failed.errors
    assert fed.states() == {1: "running", 2: "running", 3: "failed"}
    (record,) = [one for one in fed.stream.ledger.evaluations() if one.step == 3]
    assert "It is torn." in record.outcome
    del fed.wrong[3]
    assert fed.ended(0) != []
    assert fed.feed() == [], "not again in this stream"


def test_one_that_cannot_be_read_drops_no_older_one(fed):
    fed = fed(drop_stale=True)
    fed.wrong[3] = CheckpointError("It is torn.")
    fed.commit(1, 2, 3)
    assert fed.feed() == [2]


def test_one_that_is_deleted_while_it_is_read_is_passed_over(fed, monkeypatch):
    fed = fed()

    def delete(model, _options):
        if model.endswith("-2"):
            (fed.folder / "checkpoint-2" / "trainer_state.json").unlink()
            raise BadUse("It lacks a file.")

    monkeypatch.setattr(watch, "describe_model", delete)
    fed.commit(1, 2)
    assert fed.feed() == [1]
    assert fed.states() == {1: "running"}


def test_what_is_really_there_is_told_apart_from_what_the_command_should_have_given(
    fed, monkeypatch
):
    fed = fed()
    monkeypatch.setattr(watch, "describe_model", describe_model)
    fed.commit(3)
    (fed.folder / "checkpoint-3" / "config.json").write_text("{}")
    (fed.folder / "checkpoint-3" / "model.safetensors.index.json").write_text('{"weight_m')
    assert fed.feed() == []
    (torn,) = fed.stream._undescribed
    assert "Copy the model again" in torn.errors["task"]

    own = fed.folder / "step-4"
    own.mkdir()
    (own / ".metadata").write_bytes(b"?")
    monkeypatch.setattr(
        watch, "scan", lambda _folder: [SimpleNamespace(step=4, path=own, state="written")]
    )
    with pytest.raises(BadUse, match="by --hf-config"):
        fed.feed()
    assert fed.states() == {3: "failed"}


def test_conversion_that_a_folder_of_transformers_does_not_need_is_the_commands_mistake(
    fed, tmp_path
):
    fed = fed(hf_config=tmp_path)
    fed.wrong[1] = BadUse("Only a checkpoint takes --hf-config.")
    fed.commit(1)
    with pytest.raises(BadUse, match="Only a checkpoint"):
        fed.feed()
    assert fed.states() == {}


def test_weights_that_no_engine_can_load_are_one_checkpoints_failure(fed):
    fed = fed()
    fed.commit(1)
    fed.feed()
    (failed,) = fed.ended(0, error="transformers cannot run the model", wrong_use=True)
    assert failed.errors == {"task": "transformers cannot run the model"}
    assert fed.states() == {1: "failed"}
    assert fed.feed() == []


def test_an_engine_that_does_not_exist_ends_the_stream_and_nothing_is_recorded(fed):
    fed = fed()
    fed.commit(1)
    fed.feed()
    with pytest.raises(BadUse, match="no engine kind"):
        fed.ended(0, error="There is no engine kind 'x'.", wrong_use=True, any_model=True)
    assert fed.states() == {}


def test_of_checkpoints_that_ended_nothing_is_held(fed):
    fed = fed()
    fed.commit(1, 2)
    fed.feed()
    fed.stream._tasks = {0: {0: TaskOutcome(model=0, task=0, error="a")}, 1: {}}
    (evaluation,) = fed.ended(0)
    assert evaluation.errors == {"task": "a"}
    assert fed.ended(1, error="a newer one came", is_stale=True) == []
    late = fed.stream._heard
    late.put(TaskOutcome(model=0, task=0))
    fed.evaluations()
    assert (fed.stream._plans, fed.stream._tasks, fed.stream._holding) == ({}, {}, {})
    fed.commit(3)
    fed.feed()
    assert list(fed.stream._plans) == [2], "numbers are given once"


def test_the_ledger_is_asked_only_of_what_is_new_to_the_stream(fed, monkeypatch):
    fed = fed()
    ledger, asked = fed.stream.ledger, []
    evaluations = ledger.evaluations
    monkeypatch.setattr(
        ledger, "evaluations", lambda **equal: asked.append(True) or evaluations(**equal)
    )
    fed.commit(1, 2)
    record = EvaluationRecord(
        evaluation_id="another",
        suite="suite",
        model=str(fed.folder / "checkpoint-1"),
        family="f",
        state="done",
        started_at_s=1.0,
        folder="/nowhere",
        mode="exact",
    )
    ledger.add_evaluation(record)
    assert fed.feed() == [2]
    asked.clear()
    for _ in range(3):
        assert fed.feed() == []
    assert asked == []
    fed.commit(3)
    assert fed.feed() == [3]


def test_a_checkpoint_is_not_deleted_while_it_is_evaluated_and_has_its_scores_then(
    fed, monkeypatch
):
    fed = fed()
    with Checkpointer(fed.folder, keep=1) as ckpt:
        path = ckpt.save(1, {"value": 1}).result()
        assert fed.feed() == [1]
        ckpt.save(2, {"value": 2}).result()
        ckpt.wait()
    assert list(read_marks(path).wanted) == [fed.stream._plans[0][1].evaluation_id]
    scores = (
        Score(task="a", alias="a", filter="none", metric="acc", value=0.5),
        Score(task="b", alias="b", filter="strict", metric="exact_match", value=1),
        Score(task="c", alias="c", depth=1, filter="none", metric="acc", value=0.25),
        Score(task="d", alias="d", filter="none", metric="answer", value="a word"),
    )
    summarize, known = watch.summarize, {"scores": scores, "started_at_s": time.time()}
    monkeypatch.setattr(
        watch, "summarize", lambda *given, **named: replace(summarize(*given, **named), **known)
    )
    assert len(fed.ended(0)) == 1
    assert read_marks(path) == Annotations(metrics={"a/acc": 0.5, "b/exact_match,strict": 1.0})


def test_scores_of_some_samples_are_named_as_such_and_those_of_former_bytes_are_not_noted(tmp_path):
    def noted(*, started_at_s=2e9, **limits):
        """Return the names of recorded metrics, for tasks of entries and for a task inside one."""
        with Checkpointer(tmp_path) as ckpt:
            path = ckpt.save(1, {"value": 1}).result()
        scores = tuple(
            Score(task=name, alias=name, filter="none", metric="acc", value=0.5)
            for name in (*limits, "part")
        )
        suite = Suite(
            name="suite",
            entries=tuple(TaskEntry(name=name, limit=limit) for name, limit in limits.items()),
        )
        evaluation = Evaluation(
            id="e", model=str(path), suite="suite", started_at_s=started_at_s, scores=scores
        )
        note_scores(evaluation, suite)
        return sorted(read_marks(path).metrics)

    assert noted(a=None) == ["a/acc", "part/acc"]
    assert noted(a=100, b=100) == ["a:100/acc", "b:100/acc", "part:100/acc"]
    assert noted(a=0.1, b=None) == ["a:0.1/acc", "b/acc"]
    assert noted(a=None, started_at_s=1.0) == []


def test_a_checkpoint_whose_marks_cannot_be_written_is_evaluated_all_the_same(fed, caplog):
    fed = fed()
    with Checkpointer(fed.folder) as ckpt:
        path = ckpt.save(1, {"value": 1}).result()
    (path / LOCK_NAME).mkdir()
    assert fed.feed() == [1]
    assert len(fed.ended(0)) == 1
    assert "may be deleted while a-stream-step-1 reads it" in caplog.text
