"""Real runs whose loss breaks: they go back to a healthy checkpoint, or say why that does not help."""

import json
import os
import subprocess
import sys

import torch

from holdfast.checkpoint import Checkpointer

TRAIN = """
import json, os, pathlib, time
import torch
import holdfast

fault_at = pathlib.Path("fault-at")

def healthy():
    found = set()
    for marks in pathlib.Path("checkpoints").glob("step-*/holdfast-marks.json"):
        try:
            if json.loads(marks.read_text()).get("healthy"):
                found.add(int(marks.parent.name[5:]))
        except FileNotFoundError:
            pass  # deleted meanwhile
    return found

# The same in each attempt; in the first one, once there are healthy checkpoints.
def faulty_step(step):
    if not fault_at.exists() and step >= 90 and (READY):
        fault_at.write_text(str(step))
        pathlib.Path("healthy-then").write_text(json.dumps(sorted(healthy())))
    return int(fault_at.read_text()) if fault_at.exists() else 1_000_000

run = holdfast.attach()
attempt = int(os.environ["HOLDFAST_ATTEMPT"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer}
if pathlib.Path("pretrained").exists():
    with holdfast.Checkpointer("pretrained", read_only=True) as other:
        other.restore({"model": torch.nn.Linear(4, 1)})
with holdfast.Checkpointer("checkpoints", every=5, keep=KEEP) as ckpt:
    start = ckpt.restore(state)
    for step in range(start + 1, 1_000_000):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 4, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        faulty = faulty_step(step)
        FAULT
        run.step(step, loss=loss)
        ckpt.save(step, state)
        if ENDS:
            break
        time.sleep(0.02)
print("final", step, model.weight.tolist())
"""
"""Until it is to end, an attempt goes on: the supervisor may be slow to act."""


def training(fault, ends, *, ready="healthy()", keep=2):
    """Return a script whose loss breaks from the step at which `ready` holds."""
    text = TRAIN.replace("FAULT", fault).replace("ENDS", ends)
    return text.replace("READY", ready).replace("KEEP", str(keep))


def outcome(place, fault, ends, *, ready="healthy()", healthy_after=20, keep=2):
    script = place.job(training(fault, ends, ready=ready, keep=keep))
    options = ["--name", "r", "--healthy-after", str(healthy_after)]
    code, out, err = place.holdfast("run", *options, "--", *place.ranks(1, script))
    with place.ledger() as ledger:
        return code, out, err, ledger.run("r"), ledger.attempts("r"), ledger.incidents("r")


def of_the_line(place):
    checkpoints = place.json("checkpoint", "ls", "checkpoints")["checkpoints"]
    return [one["step"] for one in checkpoints if not one["abandoned"]]


NAN_ONCE = """
        if step == faulty and attempt == 1:
            with torch.no_grad():
                model.weight.fill_(float("nan"))
"""


def test_weights_that_become_nan_are_left_for_a_healthy_checkpoint(place):
    """And what belongs to another run is left as it is, though the script restores from there."""
    pretrained = place.folder / "pretrained"
    with Checkpointer(pretrained, keep=None) as other:
        for step in (500, 600):
            other.save(step, {"model": torch.nn.Linear(4, 1)}).result()
    before = {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()}
    code, out, err, _, attempts, incidents = outcome(
        place, NAN_ONCE, "step == faulty + 20 and attempt > 1"
    )
    assert code == 0, err
    (incident,) = incidents
    assert (incident.kind, incident.rank, incident.action) == ("anomaly", None, "restart")
    assert incident.diagnosis["decided_by"][0] == "observer-not-finite"
    assert "the loss is not finite at step" in incident.diagnosis["evidence"][0]["text"]
    faulty = int((place.folder / "fault-at").read_text())
    assert incident.restored_step <= faulty - 20
    assert [one.start_step for one in attempts] == [0, incident.restored_step]
    assert incident.diagnosis["anomaly"]["class"] == "hardware", "the replay has passed that step"
    assert "Cause: the hardware. Attempt 2 has passed step" in incident.explanation
    explained = place.look("explain", "r")[1]
    assert "Cause: the hardware." in explained
    assert max(of_the_line(place)) <= faulty + 20
    with place.ledger() as ledger:
        recorded = {one.step: one.state for one in ledger.checkpoints("r")}
    assert recorded[incident.restored_step] == "healthy"
    assert before == {path: path.read_bytes() for path in pretrained.rglob("*") if path.is_file()}
    (place.folder / "clean").mkdir()
    (place.folder / "clean" / "fault-at").write_text(str(faulty))
    clean = subprocess.run(
        [sys.executable, "../job.py"],
        cwd=place.folder / "clean",
        env={**os.environ, "HOLDFAST_ATTEMPT": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    (final,) = [line for line in out.splitlines() if line.startswith("final")]
    assert final in clean.stdout.splitlines()


def test_a_loss_that_breaks_at_the_same_step_again_ends_the_run(place):
    code, _, _, run, _, incidents = outcome(
        place, NAN_ONCE.replace(" and attempt == 1", ""), "False"
    )
    assert code == 1
    assert [incident.action for incident in incidents] == ["restart", "stop"]
    faulty = int((place.folder / "fault-at").read_text())
    assert f"the loss is not finite at step {faulty + 2}" in run.outcome
    assert "check the data of that step" in run.outcome
    assert {one.diagnosis["anomaly"]["class"] for one in incidents} == {"data_or_model"}
    assert max(of_the_line(place)) <= faulty - 20, "what is left to go on from is healthy"


NAN_OFTEN_THEN_ALWAYS = (
    """
        if step % 10 == 0:
            loss = loss * float("nan" if step % 20 else "inf")
"""
    + NAN_ONCE
)


def test_single_steps_without_a_number_end_nothing_and_all_do_without_a_healthy_checkpoint(place):
    code, _, _, run, attempts, incidents = outcome(
        place, NAN_OFTEN_THEN_ALWAYS, "False", ready="True", healthy_after=1_000
    )
    assert code == 1
    assert [incident.action for incident in incidents] == ["stop"]
    assert "no healthy checkpoint to go back to" in run.outcome
    faulty = int((place.folder / "fault-at").read_text())
    assert incidents[0].step >= faulty, "no single step has ended it"
    assert len(attempts) == 1


def test_a_run_goes_back_to_the_newest_of_the_saves_that_it_keeps(place):
    """Each save becomes healthy, not only one of those within the steps of --healthy-after."""
    code, _, err, _, _, (incident,) = outcome(
        place,
        NAN_ONCE,
        "step == faulty + 5 and attempt > 1",
        ready="any(step + 5 in healthy() for step in healthy())",
        keep=None,
    )
    assert code == 0, err
    faulty = int((place.folder / "fault-at").read_text())
    *_, before, newest = json.loads((place.folder / "healthy-then").read_text())
    assert newest - before == 5
    assert newest <= incident.restored_step <= faulty - 20


def test_a_loss_that_is_nan_from_the_first_step_ends_the_run(place):
    """No checkpoint of a training that never had a finite loss counts as healthy."""
    fault = "\n        loss = loss * float('nan')\n"
    code, _, _, run, _, (incident,) = outcome(place, fault, "False", ready="True", healthy_after=5)
    assert code == 1
    assert incident.kind == "anomaly"
    assert "the loss is not finite at step 10" in run.outcome
    assert "no healthy checkpoint to go back to" in run.outcome
    assert place.json("checkpoint", "ls", "checkpoints")["checkpoints"]
    with place.ledger() as ledger:
        assert "healthy" not in {one.state for one in ledger.checkpoints("r")}


def test_a_job_whose_last_loss_is_not_finite_is_not_said_to_be_fine(place):
    """A single step may be one that the script leaves out, but nothing after it shows that."""
    fault = "\n        loss = loss * float('nan') if step == 12 else loss\n"
    code, _, err, run, _, incidents = outcome(place, fault, "step == 12", ready="True")
    assert code == 0, err
    assert incidents == []
    assert "Its loss is not finite since step 12: check its last checkpoint" in run.outcome


SPIKE = """
        if step >= faulty:
            loss = loss + 20
"""


def test_a_spike_that_comes_again_is_lived_with(place):
    code, _, err, _, attempts, incidents = outcome(
        place, SPIKE, "step == faulty + 40 and attempt > 1"
    )
    assert code == 0, err
    (incident,) = incidents
    assert incident.diagnosis["decided_by"][0] == "observer-spike"
    assert incident.diagnosis["anomaly"]["class"] == "data_or_model"
    faulty = int((place.folder / "fault-at").read_text())
    assert incident.restored_step <= faulty - 20
    assert "the training goes on from there" in err
    with place.ledger() as ledger:
        (accepted,) = ledger.events("r", kind="loss_accepted")
    assert accepted.data["first_step"] == faulty
    assert attempts[-1].last_step == faulty + 40
