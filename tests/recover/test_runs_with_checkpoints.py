"""Real runs of a job with torch and the Checkpointer: stops with saved state, failing storage."""

import errno
import os
import signal

import pytest

from holdfast.checkpoint.catalog import catalog
from holdfast.checkpoint.catalog.writer_lease import read_holder

TRAIN = """
import os, time, sys
import torch
import torch.distributed as dist
import holdfast

has_others = os.environ["WORLD_SIZE"] != "1"
if has_others:
    dist.init_process_group("gloo")
run = holdfast.attach()
weights = torch.zeros(int(sys.argv[2]))
with holdfast.Checkpointer(sys.argv[1], every=int(sys.argv[3]), keep=2) as ckpt:
    state = {"weights": weights}
    for step in range(ckpt.restore(state) + 1, int(sys.argv[4]) + 1):
        time.sleep(0.02)
        gradient = torch.ones(1)
        if has_others:
            dist.all_reduce(gradient)
        weights += gradient
        run.step(step, loss=1 / step)
        ckpt.save(step, state)
        if sys.argv[5:] == [str(step)] and os.environ["HOLDFAST_ATTEMPT"] == "1":
            time.sleep(3600)
if has_others:
    dist.destroy_process_group()
"""
"""The last argument, if given, is the step at which the first attempt stands still."""


def run_arguments(place, folder, *, ranks=2, size=1000, every=1000, steps=100_000, still_at=()):
    """Return the arguments of a run; several ranks meet at the store of torchrun."""
    job = [place.job(TRAIN), str(folder), *map(str, (size, every, steps, *still_at))]
    if ranks == 1:
        return ["run", "--name", "r", "--", *place.ranks(1, *job)]
    return ["run", "--name", "r", "--nproc", str(ranks), "--", "python", *job]


def test_a_stop_saves_the_same_step_on_all_ranks_and_a_resume_goes_on_from_it(place):
    """No save is due for a thousand steps, so every save was made for the stop."""
    folder = place.folder / "checkpoints"
    arguments, begun_from = run_arguments(place, folder), 0
    for how in ("holdfast runs stop", "SIGTERM"):
        with place.start(*arguments) as process:
            place.wait_for_step("r", begun_from + 20)
            if how == "holdfast runs stop":
                assert place.holdfast("runs", "stop", "r")[0] == 0
            else:
                process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=240)
        assert process.returncode == 4, err
        assert f"Stopped by {how}." in err
        assert (f"restored step {begun_from}" in err) is (begun_from > 0)
        saved, *before = catalog.scan(folder)
        assert max((info.step for info in before), default=0) == begun_from
        assert catalog.verify(saved).state == "verified"
        assert saved.step >= begun_from + 20
        assert f"State is safe at step {saved.step}" in err
        with place.ledger() as ledger:
            last_step = ledger.attempts("r")[-1].last_step
        assert last_step == saved.step, "every rank stopped where it saved"
        arguments, begun_from = ["run", "--resume", "r"], saved.step
    listed = place.json("checkpoint", "ls", str(folder))["checkpoints"]
    assert listed[0]["state"] == "written"
    verified = place.json("checkpoint", "verify", str(folder))["checkpoints"]
    assert {one["state"] for one in verified} == {"verified"}


@pytest.fixture(scope="module")
def resumed(shared_place):
    """A run whose supervisor was killed, and that was resumed.

    Returns the place, the folder of the checkpoints, and its newest checkpoint before the resume.
    """
    place, folder = shared_place, shared_place.folder / "checkpoints"
    arguments = run_arguments(place, folder, ranks=1, every=10, steps=60, still_at=[35])
    with place.start(*arguments) as process:
        place.wait_for_step("r", 25)
        place.wait_until(lambda: any(folder.glob("step-*")))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=240)
    place.wait_until(lambda: not place.processes())
    newest = max(one.step for one in catalog.scan(folder))
    code, _, err = place.holdfast("run", "--resume", "r")
    assert code == 0, err
    return place, folder, newest


def test_resume_after_the_supervisor_was_killed_goes_on_from_the_last_checkpoint(resumed):
    place, _, newest = resumed
    with place.ledger() as ledger:
        _first, second = ledger.attempts("r")
        assert (second.start_step, second.last_step) == (newest, 60)
        # Those before are there as far as they became durable while the supervisor lived to hear of
        # it.
        after = [one.step for one in ledger.checkpoints("r") if one.step > newest]
        assert after == list(range(newest + 10, 61, 10))
    report = place.folder / "report.html"
    assert place.look("runs", "report", "r", "-o", str(report))[0] == 0
    assert "r" in report.read_text()


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused_and_fresh_sets_the_old_aside(resumed):
    place, folder, _ = resumed
    job = run_arguments(place, folder, ranks=1, every=2, steps=4)[4:]
    old = [(info.step, info.run) for info in catalog.scan(folder)]
    assert {run for _, run in old} == {"r"}
    code, _, err = place.holdfast("run", "--name", "new", "--max-restarts", "0", "--", *job)
    assert code == 1, err
    said = place.paths("new").attempt_logs(1).joinpath("rank-0.log").read_text()
    assert "has the checkpoints of another run (run 'r', attempt 2" in said
    assert "holdfast run --fresh" in said
    assert place.holdfast("run", "--name", "fresh", "--fresh", "--", *job)[0] == 0
    assert [(info.step, info.run) for info in catalog.scan(folder / "aside-1")] == old
    assert [(info.step, info.run) for info in catalog.scan(folder)] == [(4, "fresh"), (2, "fresh")]


@pytest.mark.slow
def test_a_full_disk_is_recorded_and_training_goes_on_and_saves_once_there_is_room(
    place, small_disk, fill
):
    folder = small_disk / "checkpoints"
    ballast = small_disk / "ballast"

    def failures():
        with place.ledger() as ledger:
            return [event.data for event in ledger.events("r", "save_failed")]

    with place.start(*run_arguments(place, folder, ranks=1, size=100_000, every=10)) as process:
        place.wait_until(lambda: folder.is_dir() and catalog.scan(folder))
        # Again and again: the checkpoints that are deleted leave room for the next.
        place.wait_until(lambda: fill(ballast) or failures())
        failed = failures()[0]
        place.wait_for_step("r", failed["step"] + 30)
        good = [one for one in catalog.scan(folder) if catalog.verify(one).state == "verified"]
        assert good, "an earlier checkpoint is still whole"
        ballast.unlink()
        place.wait_until(lambda: catalog.scan(folder)[0].step > failed["step"] + 30)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 4, err
    assert "Stopped by Ctrl-C." in err
    assert f"State is safe at step {catalog.scan(folder)[0].step}" in err
    assert failed["errno"] == errno.ENOSPC
    assert "is full" in err
    with place.ledger() as ledger:
        assert len(ledger.attempts("r")) == 1
        assert not ledger.incidents("r")


def test_a_checkpoint_folder_that_cannot_be_written_ends_in_one_clear_sentence(place):
    (place.folder / "a-file").write_text("")
    folder = place.folder / "a-file" / "checkpoints"
    code, _, err = place.holdfast(*run_arguments(place, folder, ranks=1))
    assert code == 1
    sentence, following = err.strip().splitlines()[-2:]
    assert "a-file/checkpoints is a file. Give Checkpointer a folder." in sentence
    assert following.startswith("holdfast: no step reported in ")
    assert following.endswith("; no checkpoint. Next: holdfast explain r")


@pytest.mark.slow
def test_each_attempt_takes_the_folder_over_from_the_one_before(place):
    folder = place.folder / "checkpoints"
    with place.start(*run_arguments(place, folder, ranks=1, every=5)) as process:
        place.wait_for_step("r", 20)
        first = read_holder(folder)
        os.kill(first.pid, signal.SIGKILL)
        place.wait_until(lambda: read_holder(folder).token != first.token)
        now = read_holder(folder)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=240)
    assert (first.run, first.generation, now.run, now.generation) == ("r", 1, "r", 2), err
    assert not [info for info in catalog.scan(folder) if info.abandoned]
