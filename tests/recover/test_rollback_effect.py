"""After a rollback, the first step of the next attempt shows if the job went back."""

from dataclasses import replace

import pytest

from holdfast.recover.policy import (
    Diagnosed,
    End,
    JobExited,
    LossBroken,
    Phase,
    Resolve,
    RestartLimits,
    RollbackMissed,
    State,
    decide,
)

BROKEN = Diagnosed(
    fingerprint="f",
    step=30,
    has_stepped=True,
    summary="The loss is not finite.",
    mitigation="Look at the data.",
    restart_helps=True,
    healthy_step=20,
    replays=True,
)
MISSED = RollbackMissed(to_step=20, start_step=25)
FAILING = State(phase=Phase.DIAGNOSING, missed_rollback=MISSED)


@pytest.fixture
def conduct(supervisor):
    """The conduct of a run in its second attempt, before which it went back from 30 to step 20."""
    conduct = supervisor()._conduct
    recorder = conduct._recorder
    recorder.attempt_began(1)
    for step in (20, 25):
        path = str(conduct._paths.root / "checkpoints" / f"step-{step}")
        recorder.checkpoint({"path": path, "step": step, "size_bytes": 1, "stall_s": 0.0})
    recorder.attempt_ended(outcome="failed", last_step=30)
    recorder.rolled_back({}, 20)
    recorder.attempt_began(2)
    return conduct


def test_after_a_rollback_without_effect_the_next_broken_loss_ends_the_run():
    _, actions = decide(RestartLimits(), FAILING, BROKEN, 0.0)
    resolve, end = actions
    assert isinstance(resolve, Resolve)
    assert isinstance(end, End)
    assert (resolve.rule, end.exit_code) == ("rollback-missed", 1)
    assert "back to the checkpoint of step 20, but continued from step 25." in end.outcome
    assert "Checkpointer.restore" in end.outcome


def test_a_rollback_without_effect_does_not_end_the_run_at_another_failure():
    crash = replace(BROKEN, healthy_step=None, replays=False)
    _, actions = decide(RestartLimits(), FAILING, crash, 0.0)
    assert not any(isinstance(one, End) for one in actions)


def test_after_a_rollback_without_effect_a_spike_is_accepted():
    running = State(phase=Phase.RUNNING, missed_rollback=MISSED)
    for is_spike, phase in ((True, Phase.RUNNING), (False, Phase.FAILING)):
        state, _ = decide(RestartLimits(), running, LossBroken(step=40, is_spike=is_spike), 0.0)
        assert state.phase is phase


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STOPPING, Phase.LEAVING, Phase.FAILING])
def test_a_rollback_without_effect_counts_until_a_person_has_the_job_go_back(phase):
    state, _ = decide(RestartLimits(), State(phase=phase), MISSED, 0.0)
    assert state.missed_rollback == MISSED
    leaving = replace(state, phase=Phase.LEAVING, goes_back_to=10)
    assert decide(RestartLimits(), leaving, JobExited(-9), 0.0)[0].missed_rollback is None


@pytest.mark.parametrize(
    ("restored", "first_step", "is_missed"),
    [
        (("checkpoints", 20), 21, False),
        (("checkpoints", 25), 26, True),
        (("checkpoints", 20), 70, False),  # reports only each 50th step
        (("teacher", 500), 21, False),
        (("teacher", 500), 30, False),
        (None, 1, False),
        (None, 31, True),
    ],
)
def test_a_rollback_is_compared_with_what_the_next_attempt_restored(
    conduct, restored, first_step, is_missed
):
    folder = conduct._paths.root
    if restored is not None:
        name, step = restored
        conduct.view.restored = {"path": str(folder / name / f"step-{step}"), "step": step}
    conduct.state = replace(conduct.state, phase=Phase.RUNNING)
    conduct.check_rollback(first_step)
    assert (conduct.state.missed_rollback is not None) is is_missed
    assert len(conduct._recorder.events("rollback_missed")) == is_missed
    remembered = conduct._recorder.remembered(RestartLimits())
    assert remembered.missed_rollback == conduct.state.missed_rollback


def test_only_the_attempt_after_a_rollback_is_compared(conduct):
    conduct._recorder.attempt_began(3)
    conduct.state = replace(conduct.state, phase=Phase.RUNNING)
    conduct.check_rollback(500)
    assert conduct.state.missed_rollback is None


FROM_OWN_FILES = """
import json, os, pathlib, time
import torch
import holdfast

broken, own = pathlib.Path("broken"), pathlib.Path("own-step")

def is_healthy():
    marks = pathlib.Path("checkpoints").glob("step-*/holdfast-marks.json")
    return any(json.loads(one.read_text()).get("healthy") for one in marks)

run = holdfast.attach()
model = torch.nn.Linear(1, 1)
with holdfast.Checkpointer("checkpoints", every=5, keep=None) as ckpt:
    start = int(own.read_text()) if own.exists() else 0
    for step in range(start + 1, 1_000_000):
        if os.environ["HOLDFAST_ATTEMPT"] == "1" and is_healthy():
            broken.touch()
        pathlib.Path("own-next").write_text(str(step))  # it may be killed at any moment
        os.replace("own-next", own)
        run.step(step, loss=float("nan") if broken.exists() else 1.0)
        ckpt.save(step, {"model": model})
        time.sleep(0.02)
"""


def test_a_script_that_restores_from_files_of_its_own_is_not_rolled_back_twice(place):
    script = place.job(FROM_OWN_FILES)
    code, _, err = place.holdfast("run", "--name", "r", "--", *place.ranks(1, script))
    assert code == 1, err
    with place.ledger() as ledger:
        (missed,) = ledger.events("r", kind="rollback_missed")
        incidents = ledger.incidents("r")
        outcome = ledger.run("r").outcome
    assert [one.action for one in incidents] == ["restart", "stop"]
    assert missed.data["start_step"] > missed.data["to_step"]
    assert f"back to the checkpoint of step {missed.data['to_step']}, but" in outcome
    assert missed.data["text"] in err
    assert missed.data["text"] in " ".join(
        one.get("text", "") for one in place.json("explain", "r")["chain"]
    )
