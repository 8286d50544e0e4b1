"""Real runs of a job that uses torch and the Checkpointer: stopping with state saved, and storage that fails."""

import os
import signal

import pytest

from holdfast.checkpoint import catalog

TRAIN = """
import time, sys
import torch
import torch.distributed as dist
import holdfast

dist.init_process_group("gloo")
run = holdfast.attach()
weights = torch.zeros(int(sys.argv[2]))
with holdfast.Checkpointer(sys.argv[1], every=int(sys.argv[3]), keep=2) as ckpt:
    state = {"weights": weights}
    for step in range(ckpt.restore(state) + 1, int(sys.argv[4]) + 1):
        time.sleep(0.02)
        gradient = torch.ones(1)
        dist.all_reduce(gradient)
        weights += gradient
        run.step(step, loss=1 / step)
        ckpt.save(step, state)
dist.destroy_process_group()
"""


def run_arguments(place, folder, *, ranks=2, size=1000, every=1000, steps=100_000):
    script = place.job(TRAIN)
    job = ["python", script, str(folder), str(size), str(every), str(steps)]
    return ["run", "--name", "r", "--nproc", str(ranks), "--", *job]


@pytest.mark.parametrize(
    "how",
    [pytest.param("Ctrl-C", marks=pytest.mark.slow), "SIGTERM", pytest.param("runs stop", marks=pytest.mark.slow)],
)
def test_a_stop_saves_the_same_step_on_all_ranks_and_a_resume_goes_on_from_it(place, how):
    """Nothing is due for a thousand steps: what is saved was saved for the stop."""
    folder = place.folder / "checkpoints"
    with place.start(*run_arguments(place, folder)) as process:
        place.wait_for_step("r", 20)
        if how == "runs stop":
            assert place.holdfast("runs", "stop", "r")[0] == 0
        else:
            process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert f"Stopped by {'holdfast runs stop' if how == 'runs stop' else how}." in err
    (saved,) = catalog.scan(folder)
    assert catalog.verify(saved).state == "verified"
    assert saved.step >= 20
    assert f"State is safe at step {saved.step}" in err
    with place.ledger() as ledger:
        assert ledger.attempts("r")[-1].last_step == saved.step, "every rank stopped where it saved"
    if how != "Ctrl-C":
        return  # how a run goes on does not depend on who stopped it
    with place.start("run", "--resume", "r") as process:
        place.wait_for_step("r", saved.step + 5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert f"restored step {saved.step}" in err
    assert max(one.step for one in catalog.scan(folder)) > saved.step
    assert place.json("checkpoint", "ls", str(folder))["checkpoints"][0]["state"] == "written"
    assert {one["state"] for one in place.json("checkpoint", "verify", str(folder))["checkpoints"]} == {"verified"}


def test_resume_after_the_supervisor_was_killed_goes_on_from_the_last_checkpoint(place):
    folder = place.folder / "checkpoints"
    with place.start(*run_arguments(place, folder, ranks=1, every=10, steps=60)) as process:
        place.wait_for_step("r", 25)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    place.wait_until(lambda: not place.processes(), timeout_s=10)
    newest = max(one.step for one in catalog.scan(folder))
    code, _, err = place.holdfast("run", "--resume", "r")
    assert code == 0, err
    with place.ledger() as ledger:
        _first, second = ledger.attempts("r")
        assert (second.start_step, second.last_step) == (newest, 60)
        # Those before are there as far as they became durable while the supervisor lived to hear of it.
        after = [one.step for one in ledger.checkpoints("r") if one.step > newest]
        assert after == list(range(newest + 10, 61, 10))
    report = place.folder / "report.html"
    assert place.holdfast("runs", "report", "r", "-o", str(report))[0] == 0
    assert "r" in report.read_text()


@pytest.mark.slow
def test_a_full_disk_ends_in_one_clear_sentence_and_costs_no_good_checkpoint(place, small_disk, fill):
    folder = small_disk / "checkpoints"
    ballast = small_disk / "ballast"
    with place.start(*run_arguments(place, folder, size=100_000, every=10)) as process:
        place.wait_until(lambda: folder.is_dir() and catalog.scan(folder), timeout_s=60)
        fill(ballast)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    last_line = err.strip().splitlines()[-1]
    assert "is full" in last_line
    assert "Free space" in last_line
    good = [one for one in catalog.scan(folder) if catalog.verify(one).state == "verified"]
    assert good, "an earlier checkpoint is still whole"
    with place.ledger() as ledger:
        assert [incident.action for incident in ledger.incidents("r")] == ["stop"]
        reached = ledger.attempts("r")[0].last_step
    ballast.unlink()
    with place.start("run", "--resume", "r") as process:
        place.wait_for_step("r", reached + 15)  # beyond what the first attempt has told of
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert f"restored step {max(one.step for one in good)}" in err


def test_a_checkpoint_folder_that_cannot_be_written_ends_in_one_clear_sentence(place):
    (place.folder / "a-file").write_text("")
    code, _, err = place.holdfast(*run_arguments(place, place.folder / "a-file" / "checkpoints"))
    assert code == 1
    assert "a-file/checkpoints is a file. Give Checkpointer a folder." in err.strip().splitlines()[-1]
