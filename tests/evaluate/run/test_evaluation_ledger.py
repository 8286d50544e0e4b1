"""Check the end of an evaluation with a failing ledger: results and next step are still reported."""

import re
from contextlib import suppress

import pytest

from holdfast.core.errors import BadUse, LedgerError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import DONE
from holdfast.evaluate.run import evaluate as run
from holdfast.evaluate.run import ledger
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import TaskResult
from holdfast.evaluate.types.timeline import Begin, TimelineFile
from holdfast.evaluate.wire.messages import ModelOutcome, TaskOutcome

RESULTS = {"results": {"a": {"alias": "a", "acc,none": 0.5}}, "group_subtasks": {"a": []}}
FULL = "The ledger cannot be written: database or disk is full. See that its disk has room."


class World:
    """Run evaluations by fake sessions, with a ledger that fails from a state on."""

    def __init__(self, folder, monkeypatch) -> None:
        self.home = folder / "home"
        self.paths = EvaluationPaths(self.home, "x")
        self.error: BaseException | None = None
        self.wrong_use = ""
        self.refuses: str | None = None
        """The state that cannot be recorded."""
        world = self

        class Session:
            def __init__(self, config, wanted, told) -> None:
                self._told = told

            def add(self, model) -> None: ...
            def finish(self) -> None: ...

            async def run(self) -> int:
                with TimelineFile(world.paths.timeline) as timeline:
                    timeline.append(Begin(started_at_s=1.0, suite="s", tasks=["a"]))
                if world.error:
                    raise world.error
                if world.wrong_use:
                    self._told(ModelOutcome(model=0, error=world.wrong_use, wrong_use=True))
                else:
                    self._told(TaskOutcome(model=0, task=0, result=TaskResult(results=RESULTS)))
                    self._told(ModelOutcome(model=0, digest="d", numerics="n"))
                return DONE

        set_evaluation, remove_evaluation = Ledger.set_evaluation, Ledger.remove_evaluation

        def set_or_fail(ledger, evaluation_id, **changes) -> None:
            if changes.get("state") == world.refuses:
                raise LedgerError(FULL)
            set_evaluation(ledger, evaluation_id, **changes)

        def remove_or_fail(ledger, evaluation_id) -> None:
            if world.refuses:
                raise LedgerError(FULL)
            remove_evaluation(ledger, evaluation_id)

        monkeypatch.setattr(run, "Session", Session)
        monkeypatch.setattr(Ledger, "set_evaluation", set_or_fail)
        monkeypatch.setattr(Ledger, "remove_evaluation", remove_or_fail)

    def evaluate(self):
        engine = EngineSpec(kind="simulated")
        return run.evaluate(
            "a", "m", options=EvaluateOptions(home=self.home, engine=engine, evaluation_id="x")
        )

    def state(self) -> str:
        with Ledger.open(f"sqlite:///{self.home}/ledger.db") as ledger:
            return ledger.evaluation("x").state


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_scores_that_cannot_be_recorded_are_kept_and_resume_records_them(world):
    world.refuses = "done"
    with pytest.raises(EvaluationError) as caught:
        world.evaluate()
    assert str(caught.value) == (
        f"Its tasks have ended and their results are in {world.paths.root}, but not all of it "
        "could be recorded: "
        f"{FULL} Then go on with: holdfast eval resume x"
    )
    assert world.state() == "running"
    world.refuses = None
    world.error = AssertionError("nothing is to be run again")
    assert run.resume("x", home=world.home).scores[0].value == 0.5
    assert world.state() == "done"


def test_results_that_cannot_be_written_do_not_hide_the_next_step(world, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device", "results.json")

    with monkeypatch.context() as within:
        within.setattr(ledger, "write_evaluation", fails)
        with pytest.raises(
            EvaluationError, match=r"No space left on device: 'results.json'\. Check .* resume x$"
        ):
            world.evaluate()
    assert run.resume("x", home=world.home).state == world.state() == "done"


@pytest.mark.parametrize(
    ("error", "raised", "why"),
    [
        (EvaluationError("No agent stays up."), EvaluationError, "No agent stays up."),
        (
            OSError(28, "No space left"),
            EvaluationError,
            "[Errno 28] No space left. Check that the disk has room",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, "It was stopped."),
    ],
)
def test_what_ended_it_is_said_before_what_the_ledger_says(world, error, raised, why):
    world.error, world.refuses = error, "stopped"
    with pytest.raises(raised) as caught:
        world.evaluate()
    first, second = str(caught.value).split("\n")
    assert first.startswith(why)
    assert first.endswith(" Go on with: holdfast eval resume x")
    assert second == f"{FULL} Finished results are in {world.paths.root}."
    world.error = world.refuses = None
    assert run.resume("x", home=world.home).state == "done"


def test_a_ledger_that_fails_at_the_start_is_said_with_the_next_step(world):
    world.refuses = "running"
    with pytest.raises(
        EvaluationError, match=re.escape(f"{FULL} Go on with: holdfast eval resume x")
    ):
        world.evaluate()
    assert world.state() == "stopped"


def test_wrong_use_is_said_though_the_ledger_cannot_forget_it(world):
    world.wrong_use, world.refuses = "There is no task 'a'.", "failed"
    with pytest.raises(BadUse) as caught:
        world.evaluate()
    assert str(caught.value).startswith("There is no task 'a'.")
    assert FULL in str(caught.value)


def test_what_another_ledger_holds_is_gone_on_with_in_this_one(world):
    world.error = EvaluationError("No agent stays up.")
    with suppress(EvaluationError):
        world.evaluate()
    for file in world.home.glob("ledger.db*"):
        file.unlink()
    world.error = None
    assert run.resume("x", home=world.home).state == world.state() == "done"
