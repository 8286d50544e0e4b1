"""Which checkpoints of a folder are under way at a time, and which comes next."""

from types import SimpleNamespace

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate import stream
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.evaluation import Evaluation
from holdfast.evaluate.options import EvaluateOptions
from holdfast.evaluate.policy.priors import TaskHistory, encode_history
from holdfast.evaluate.records import history_of, record_end
from holdfast.evaluate.suite import Suite, TaskEntry


class Fed:
    """A stream whose session only writes down which steps it was given."""

    def __init__(self, tmp_path, ledger, monkeypatch, **options):
        self.folder, self.steps = tmp_path / "checkpoints", []
        self.folder.mkdir()
        paths = EvaluationPaths(tmp_path / "home", "a-stream")
        suite = Suite(name="suite", entries=(TaskEntry(name="task"),))
        self.stream = stream._Stream(
            suite, self.folder, EvaluateOptions(home=tmp_path / "home", **options), paths, ledger, None, {}
        )
        session = SimpleNamespace(add=lambda added: self.steps.append(int(added.name.rsplit("-", 1)[1])))
        monkeypatch.setattr(stream._Stream, "_start", lambda _self, _first: session)
        monkeypatch.setattr(stream, "describe_model", lambda _model, _options: None)

    def commit(self, *steps):
        for step in steps:
            (self.folder / f"checkpoint-{step}").mkdir()
            (self.folder / f"checkpoint-{step}" / "trainer_state.json").touch()

    def feed(self):
        """The steps that are new to the session."""
        before = len(self.steps)
        self.stream._feed()
        return self.steps[before:]

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
    """For whoever begins while the stream goes on."""
    fed = fed()
    fed.commit(1)
    fed.feed()
    plan, paths = fed.stream._plans[0]
    history = [TaskHistory(task="lm-eval:task", numbers=bytes(4), new_tokens=bytes(4), metric_s=bytes(4))]
    learned = CoordinatorFiles(fed.stream.paths.root).learned
    learned.parent.mkdir(parents=True, exist_ok=True)
    learned.write_bytes(encode_history(history))
    ended = Evaluation(
        id=paths.evaluation_id, model=plan.model, suite="suite", state="done", folder=paths.root, scores=()
    )
    record_end(fed.stream.ledger, plan, fed.stream.paths, ended)
    assert history_of(fed.stream.ledger, plan) == history
