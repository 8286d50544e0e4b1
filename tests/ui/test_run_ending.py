"""Check the last line of a run: step, time, ETTR, checkpoint and the next command."""

import pytest
import sample_runs

from holdfast.cli.run.ending import ending
from holdfast.core.ledger import Checkpoint, Event, Run


@pytest.fixture
def home(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        yield ledger, tmp_path


def test_a_completed_run_says_how_far_it_came_and_what_is_next(home):
    sample_runs.faulty_run(*home)
    said = ending(*home, "demo-1")
    assert said.startswith("step 400 after 2 min 11 s, ETTR 65 %; newest checkpoint: step 400 in ")
    assert said.endswith(". Next: holdfast runs report demo-1")


@pytest.mark.parametrize(
    ("state", "following"),
    [("failed", "holdfast explain r"), ("stopped", "holdfast run --resume r")],
)
def test_without_a_step_or_checkpoint_it_says_so(home, state, following):
    ledger, folder = home
    run = Run(
        run_id="r", command=["false"], pid=1, host="h", cwd="/", started_at_s=1.0, ended_at_s=4.0,
        state=state, exit_code=1, outcome="It failed.", options={},
    )  # fmt: skip
    ledger.add_run(run)
    said = ending(ledger, folder, "r")
    assert said == f"no step reported in 3.0 s; no checkpoint. Next: {following}"
    for step, state in ((1200, "written"), (1300, "damaged")):
        mark = Checkpoint(
            run_id="r", attempt=1, step=step, path=f"ck/step_{step}", state=state, size_bytes=1,
            stall_s=0.0, committed_at_s=float(step),
        )  # fmt: skip
        ledger.add_checkpoint(mark)
    assert "; newest checkpoint: step 1,200 in ck/step_1200. " in ending(ledger, folder, "r")
    goes_back = Event(
        run_id="r", attempt=1, at_s=1250.0, kind="rolled_back", data={"to_step": 1100}
    )
    ledger.add_event(goes_back)
    assert "no checkpoint" in ending(ledger, folder, "r"), "the rollback has left step 1,200"
