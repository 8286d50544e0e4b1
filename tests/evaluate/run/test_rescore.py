"""Check a rescore: in the original folder, and without loss of present scores."""

from pathlib import Path

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.run import evaluate as module
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import Evaluation, read_evaluation, write_evaluation
from holdfast.evaluate.types.harness import TaskResult
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.wire.messages import TaskOutcome


@pytest.fixture
def begun(tmp_path):
    """Make an evaluation of two tasks that was begun in `there`; the second has no scores."""
    there = tmp_path / "there"
    there.mkdir()
    paths = EvaluationPaths(tmp_path / "home", "e1")
    paths.state.mkdir(parents=True)
    options = EvaluateOptions(home=paths.home, ledger=f"sqlite:///{tmp_path}/ledger.db",
                              engine=EngineSpec(kind="simulated"))  # fmt: skip
    suite = Suite(name="s", entries=(TaskEntry(name="good"), TaskEntry(name="bad")))
    plan = Planned(suite=suite, model="m", manifest=None, options=options, directory=str(there))
    plan.write(paths)
    with Ledger.open(options.ledger) as ledger:
        ledger.add_evaluation(plan.record(paths))
    before = Evaluation(
        id="e1", suite="s", model="m", numerics="n", digest="d", folder=str(paths.root), state="failed",
        results={"results": {"good": {"acc": 0.5}}}, errors={"bad": "It has no data."},
    )  # fmt: skip
    write_evaluation(before, paths.root)
    return paths, there


def rescored(paths, monkeypatch, *outcomes):
    """Rescore with these task outcomes; return the session's folder."""
    worked_in = []

    def run(session, _model):
        worked_in.append(Path.cwd())
        Path(session._config.folder).mkdir()
        for outcome in outcomes:
            session._on_message(outcome)

    monkeypatch.setattr(module, "_run_session", run)
    monkeypatch.chdir(paths.home)
    module.rescore("e1", home=Path())
    assert Path.cwd() == paths.home
    return worked_in


RESULT = TaskResult(results={"results": {"good": {"acc": 0.7}}, "group_subtasks": {}, "configs": {}},
                    notes=["It samples."])  # fmt: skip
BAD = TaskOutcome(model=0, task=1, error="It has no data.")


def test_it_works_where_the_evaluation_was_begun(begun, monkeypatch):
    paths, there = begun
    good = TaskOutcome(model=0, task=0, result=RESULT)
    assert rescored(paths, monkeypatch, good, BAD) == [there]
    after = read_evaluation(paths.root)
    assert after.results["results"]["good"]["acc"] == 0.7
    assert after.notes == ("It samples.",)


def test_a_task_that_cannot_be_scored_again_keeps_its_scores(begun, monkeypatch):
    paths, _there = begun
    lost = TaskOutcome(model=0, task=0, error="Its data is gone.")
    with pytest.raises(EvaluationError, match=r"good cannot be scored again: Its data is gone\."):
        rescored(paths, monkeypatch, lost, BAD)
    assert read_evaluation(paths.root).results["results"]["good"]["acc"] == 0.5


def test_a_folder_that_is_gone_is_said(begun, monkeypatch, caplog):
    paths, there = begun
    there.rmdir()
    good = TaskOutcome(model=0, task=0, result=RESULT)
    assert rescored(paths, monkeypatch, good, BAD) == [paths.home]
    assert "no longer exists" in caplog.text
