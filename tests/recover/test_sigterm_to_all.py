"""SIGTERM to every process of a job, as by systemd and Slurm: one save at one step of all ranks."""

from contextlib import suppress

import psutil
import pytest
import torch

from holdfast.checkpoint.catalog import catalog

TRAIN = """
import pathlib, time
import torch
import torch.distributed as dist
import holdfast

ATTACH
dist.init_process_group("gloo")
torch.manual_seed(0)
weights = torch.zeros(1000)
last = pathlib.Path("last-step")
ckpt = holdfast.Checkpointer("checkpoints", every=1000)
state = {"weights": weights}
step = ckpt.restore(state)
batches = BATCHES
while not last.exists() or step < int(last.read_text()):
    time.sleep(0.02)
    step += 1
    next(batches)
    gradient = torch.rand(1000)
    dist.all_reduce(gradient)
    weights += gradient
    STEP
    ckpt.save(step, state)
    if dist.get_rank() == 0:
        pathlib.Path("progress").write_text(str(step))
torch.save(weights, f"final-{dist.get_rank()}.pt")
dist.destroy_process_group()
"""
FORMS = {
    "attached": ("run = holdfast.attach()", "iter(int, 1)", "run.step(step)"),
    "unmodified": ("", "iter(int, 1)", ""),
    "workers": (
        "run = holdfast.attach()",
        "iter(torch.utils.data.DataLoader(range(10**9), num_workers=1, generator=torch.Generator()))",
        "run.step(step)",
    ),
}
"""Attached; one that only has a Checkpointer.

One that has workers of a DataLoader, which get the signal, too.
"""


def train(place, form="attached"):
    text = TRAIN
    for word, by in zip(("ATTACH", "BATCHES", "STEP"), FORMS[form], strict=True):
        text = text.replace(word, by)
    return ["run", "--name", "r", "--nproc", "2", "--", "python", place.job(text)]


def has_reached(place, step):
    progress = place.folder / "progress"
    return lambda: progress.exists() and int(progress.read_text() or 0) >= step


def sigterm_to_all(process):
    supervisor = psutil.Process(process.pid)
    for each in [*supervisor.children(recursive=True), supervisor]:  # the ranks hear of it first
        with suppress(psutil.NoSuchProcess):
            each.terminate()


def undisturbed(steps):
    torch.manual_seed(0)
    weights = torch.zeros(1000)
    for _ in range(steps):
        weights += torch.rand(1000) * 2
    return weights


@pytest.mark.slow
def test_sigterm_to_every_process_saves_once_and_a_resume_is_bit_identical(place):
    """No save is due for a thousand steps, so every save was made for the stop.

    The run has workers; it is resumed by a script that does not attach, then once more to its end.
    """
    arguments, begun_from = train(place, "workers"), 0
    for number in (1, 2):
        with place.start(*arguments) as process:
            place.wait_until(has_reached(place, begun_from + 20))
            sigterm_to_all(process)
            _, err = process.communicate(timeout=240)
        assert process.returncode == 4, err
        assert "Stopped by SIGTERM." in err
        saved, *before = catalog.scan(place.folder / "checkpoints")
        assert [info.step for info in before] == [begun_from] * (number - 1)
        assert int((place.folder / "progress").read_text()) in (saved.step, saved.step - 1)
        assert catalog.verify(saved).state == "verified"
        assert saved.step >= begun_from + 20
        assert f"State is safe at step {saved.step}" in err
        train(place, "unmodified")
        arguments, begun_from = ["run", "--resume", "r"], saved.step
    with place.ledger() as ledger:
        assert ledger.incidents("r") == []
    (place.folder / "last-step").write_text(str(saved.step + 5))
    code, _, err = place.holdfast("run", "--resume", "r")
    assert code == 0, err
    for rank in range(2):
        assert torch.equal(
            torch.load(place.folder / f"final-{rank}.pt"), undisturbed(saved.step + 5)
        )


def test_a_second_sigterm_to_every_process_ends_it_without_saving(place):
    """The ranks stand still before the step at which they would save."""
    script = train(place)
    place.job(
        (place.folder / "job.py")
        .read_text()
        .replace("    next(batches)", "    time.sleep(3600 * (step > 5))")
    )
    with place.start(*script) as process:
        place.wait_until(has_reached(place, 5))
        sigterm_to_all(process)
        while "saving state" not in process.stderr.readline():
            pass
        sigterm_to_all(process)
        process.communicate(timeout=240)
    assert process.returncode == 4
    assert catalog.scan(place.folder / "checkpoints") == []


@pytest.mark.slow
def test_a_rank_that_alone_gets_sigterm_ends_by_it_and_the_run_goes_on(place):
    with place.start(*train(place)) as process:
        place.wait_until(has_reached(place, 5))
        children = psutil.Process(process.pid).children(recursive=True)
        (victim,) = (
            each
            for each in children
            if each.cmdline()[1:] == ["job.py"] and each.environ()["RANK"] == "1"
        )
        victim.terminate()
        with place.ledger() as ledger:
            place.wait_until(lambda: ledger.incidents("r"))
            (place.folder / "last-step").write_text("0")
            process.communicate(timeout=240)
            (incident,) = ledger.incidents("r")
    assert (incident.rank, incident.action) == (1, "restart")
    assert process.returncode == 0
