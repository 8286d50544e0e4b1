"""After a rollback, the first step of the next attempt shows if the job went back."""

from dataclasses import replace

from holdfast.recover.policy import (
    Diagnosed,
    End,
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
FAILING = State(phase=Phase.DIAGNOSING, missed_rollback=RollbackMissed(to_step=20, start_step=25))


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
        own.write_text(str(step))
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
