"""Real runs with killed ranks: the next attempt restores from memory; the run's end frees it."""

import pytest

TRAIN = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
import holdfast

dist.init_process_group("gloo")
run = holdfast.attach()
rank, once = dist.get_rank(), pathlib.Path("killed")
weights = torch.zeros(1000)
with holdfast.Checkpointer("checkpoints", every=5) as ckpt:
    state = {"weights": weights}
    for step in range(ckpt.restore(state) + 1, 13):
        assert weights.eq(step - 1).all()
        weights += 1
        dist.barrier()
        run.step(step, loss=1 / step)
        ckpt.save(step, state)
        if step == 8 and rank == dist.get_world_size() - 1 and (sys.argv[1] == "always" or not once.exists()):
            ckpt.wait()
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_killed_rank_s_job_goes_on_from_the_memory_of_its_node(place):
    """One of two ranks; that a single one does is in the test below."""
    code, _, err = place.holdfast(
        "run", "--name", "r", "--", *place.ranks(2, place.job(TRAIN), "once")
    )
    assert code == 0, err
    with place.ledger() as ledger:
        (restored,) = [event.data for event in ledger.events("r") if event.kind == "restored"]
        assert [(attempt.start_step, attempt.last_step) for attempt in ledger.attempts("r")] == [
            (0, 8),
            (5, 12),
        ]
    assert (restored["step"], restored["tier"]) == (5, "memory")
    assert restored["passed_over"] == []


@pytest.mark.slow
def test_a_run_that_is_given_up_leaves_no_memory_behind(place):
    """It restores from memory until the supervisor has had enough.

    The fixture holds that no process is left.
    """
    options = ["run", "--name", "r", "--max-restarts", "1"]
    code, _, err = place.holdfast(*options, "--", *place.ranks(1, place.job(TRAIN), "always"))
    assert code != 0, err
    with place.ledger() as ledger:
        tiers = [event.data["tier"] for event in ledger.events("r") if event.kind == "restored"]
    assert set(tiers) == {"memory"}
