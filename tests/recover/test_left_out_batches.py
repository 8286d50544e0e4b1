"""Real runs whose data break the loss: they go back and leave only those batches out."""

import json
import os
import subprocess

import pytest

import light_torchrun

POISONED = 110
"""The number of the batch with bad data."""

TRAIN = """
import json, os, pathlib, signal, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import holdfast

POISONED, VALUE, KILLS, BATCHES = 110, float(os.environ["VALUE"]), os.environ.get("KILLS"), 160
by_hand = json.loads(os.environ.get("LEFT_OUT", "[]"))

class Data(Dataset):
    def __len__(self):
        return BATCHES * 2 * 4

    def __getitem__(self, index):
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return (inputs * VALUE if index == bad else inputs), index

def wait_for_healthy():
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for marks in pathlib.Path("checkpoints").glob("step-*/holdfast-marks.json"):
            try:
                if json.loads(marks.read_text()).get("healthy"):
                    return
            except FileNotFoundError:
                pass  # deleted meanwhile
        time.sleep(0.02)

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ.get("HOLDFAST_ATTEMPT", "0"))
data = Data()
sampler = DistributedSampler(data, 2, rank, seed=5)
order = torch.randperm(len(data), generator=torch.Generator().manual_seed(5)).tolist()
bad = order[2 * 4 * (POISONED - 1)]
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=WORKERS)

run = holdfast.attach()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
state, seen, has_bad = {"model": model, "optimizer": optimizer}, [], False
if by_hand:  # by nothing of Holdfast's
    numbered = ((number, one) for number, one in enumerate(loader, 1) if number not in by_hand)
else:
    batches = run.batches(loader)
    numbered = ((batches.number, one) for one in batches)
with holdfast.Checkpointer("checkpoints", every=10, keep=2) as ckpt:
    position = {} if by_hand else {"batches": batches}
    step = 0 if by_hand else ckpt.restore(state, per_rank=position)
    for number, (inputs, indices) in numbered:
        if number == POISONED - 3 and attempt == 1:
            wait_for_healthy()
        if KILLS and number > POISONED + 2 and attempt == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        has_bad |= number == POISONED
        loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean() + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if attempt:
            run.step(step, loss=loss)
            ckpt.save(step, state, per_rank=position)
            time.sleep(0.01)
    if attempt and has_bad:
        time.sleep(90)  # it is about to be ended
weights = [tensor.tolist() for tensor in model.state_dict().values()]
pathlib.Path(f"final-{rank}").write_text(json.dumps([step, weights]))
dist.destroy_process_group()
"""


def finals(folder):
    """The number of steps and the weights of each rank."""
    return [json.loads((folder / f"final-{rank}").read_text()) for rank in range(2)]


def outcome(place, value, *, workers=0, kills=""):
    script = place.job(TRAIN.replace("WORKERS", str(workers)))
    job = ["torchrun", "--nproc-per-node", "2", script]
    environment = {**place.environment, "VALUE": value, "KILLS": kills, "OMP_NUM_THREADS": "1"}
    with place.start("run", "--name", "r", "--", *job, environment=environment) as process:
        _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    with place.ledger() as ledger:
        return err, ledger.incidents("r")


def by_hand(place, value, first, last):
    """Return the weights with the same batches left out by hand, without a supervisor."""
    folder = place.folder / "by-hand"
    folder.mkdir()
    environment = {**os.environ, "VALUE": value, "OMP_NUM_THREADS": "1"}
    environment["LEFT_OUT"] = json.dumps(list(range(first, last + 1)))
    done = subprocess.run(
        light_torchrun.command(folder, 2, "../job.py"),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return finals(folder)


def ranges(ledger, kind):
    return [
        (one.attempt, one.data["first"], one.data["last"]) for one in ledger.events("r", kind=kind)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "rule", "workers", "kills"),
    [("300", "observer-spike", 0, "yes"), ("nan", "observer-not-finite", 1, "")],
)
def test_what_broke_the_loss_is_left_out_and_nothing_else(place, value, rule, workers, kills):
    """Also in an attempt after a rank was killed, which trains on what comes before once more."""
    err, (replayed, incident, *later) = outcome(place, value, workers=workers, kills=kills)
    with place.ledger() as ledger:
        (decided,), skipped = ranges(ledger, "leave_out"), ranges(ledger, "batches_skipped")
    assert (incident.kind, incident.action) == ("anomaly", "restart")
    assert "The same steps run again first" in replayed.explanation
    for one in (replayed, incident):
        assert one.diagnosis["anomaly"]["class"] == "data_or_model"
        assert "Cause: the data or the model." in one.explanation
    assert incident.step == replayed.step
    assert incident.diagnosis["decided_by"][0] == rule
    _, first, last = decided
    assert first < POISONED <= last <= POISONED + 4
    attempts = [3, 4] if kills else [3]
    assert skipped == [(attempt, first, last) for attempt in attempts], "of two ranks, once"
    assert [one.kind for one in later] == ["exit"] * (len(attempts) - 1)
    assert all(one.restored_step < first for one in (incident, *later))
    assert f"batches {first} to {last} of the data are left out" in incident.explanation
    assert f"Batches {first} to {last} were left out" in err
    assert finals(place.folder) == by_hand(place, value, first, last)
    shown = place.look("incidents", "show", str(incident.incident_id))[1]
    assert f"from the state of step {incident.restored_step}" in shown
    assert f"batches {first} to {last}" in shown
