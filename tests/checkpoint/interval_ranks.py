"""Run one of two ranks: `interval_ranks.py FOLDER RANK`. Exit with 0 if all is well.

Messages between the ranks take time.
"""

import itertools
import logging
import resource
import sys
import threading

import torch
import torch.distributed as dist
from waiting import until

from holdfast.checkpoint import Checkpointer, checkpointer, scan
from holdfast.checkpoint.distributed import rank_agreement
from holdfast.checkpoint.save import plan_cache, staging_thread
from holdfast.testing import FakeClock

STEPS = 200
PACE_S = (1.0, 37.0)
"""Seconds a step by the clock of each rank; rank 0's clock decides."""


def by_time(folder, rank):
    """Save every 10 s by rank 0's clock, on both ranks at the same steps; rank 1's clock is faster."""
    from datetime import timedelta

    clock = FakeClock()
    checkpointer.SystemClock = lambda: clock
    saved = []
    with Checkpointer(folder, every=timedelta(seconds=10), keep=None) as ckpt:
        for step in range(1, STEPS):
            clock.advance(PACE_S[rank])
            ckpt.before_update()
            handle = ckpt.save(step, {"t": torch.full((9,), float(step))}, per_rank={"rank": rank})
            saved += [handle.step] if handle.step is not None else []
            if handle.step is not None:
                handle.result()
    assert len(saved) >= 3
    assert all(later - former >= 10 for former, later in itertools.pairwise(saved)), saved
    assert [info.step for info in reversed(scan(folder))] == saved
    assert all(ckpt.per_rank_states(step) == [{"rank": 0}, {"rank": 1}] for step in saved)


def by_time_in_slow_steps(folder, rank):
    """Vote at each step; a vote from before a save must not cause another save."""
    rank_agreement.ANSWER_EVERY_S = 0.0
    by_time(folder, rank)


def again_after_a_failure(folder, rank):
    """Check the retry if the writing process of one rank cannot write."""

    def limit(ckpt, size_bytes):
        resource.prlimit(ckpt._engine._writer.pid, resource.RLIMIT_FSIZE, (size_bytes, -1))

    _save_again(folder, rank, lambda ckpt, _: limit(ckpt, 100), lambda ckpt: limit(ckpt, -1))


def again_after_a_change(folder, rank):
    """Check the retry if a tensor of one rank changes before the copy, unseen by PyTorch."""
    gate, copy_into, budget_bytes = (
        threading.Event(),
        staging_thread.copy_into,
        plan_cache.BUDGET_BYTES,
    )

    def later(*arguments, **named):
        gate.wait()
        copy_into(*arguments, **named)

    def change(_, tensor):
        tensor.numpy()[:] += 1
        gate.set()

    gate.set()
    staging_thread.copy_into, plan_cache.BUDGET_BYTES = later, 0
    _save_again(folder, rank, lambda *_: gate.clear(), lambda _: None, after=change)
    staging_thread.copy_into, plan_cache.BUDGET_BYTES = copy_into, budget_bytes


def _save_again(folder, rank, before, mend, *, after=lambda *_: None):
    """Fail a save on rank 1; each rank notices at another step, but both retry at one step."""
    due, step, tensor = 10**6, 0, torch.ones(10_000)
    with Checkpointer(folder, every=due, keep=None) as ckpt:

        def save():
            ckpt.before_update()
            return ckpt.save(step, {"t": torch.ones(9)}, per_rank={"rank": rank, "tensor": tensor})

        assert save().result()
        step = due
        if rank == 1:
            before(ckpt, tensor)
        handle = save()
        if rank == 1:  # the other rank goes on until it notices the failure
            after(ckpt, tensor)
            until(handle.done)
            mend(ckpt)
        steps = []

        def is_saved_again():
            nonlocal step
            step += 1
            steps.extend([step] if (again := save()).step is not None else [])
            return steps and again.result() is not None

        until(is_saved_again)
    theirs = [None, None]
    dist.all_gather_object(theirs, steps)
    assert theirs[0] == theirs[1] == steps[-1:]
    assert [info.step for info in scan(folder)] == [steps[-1], 0]
    assert [each["rank"] for each in ckpt.per_rank_states(steps[-1])] == [0, 1]


def main(folder, rank):
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for scenario in (
        again_after_a_failure,
        again_after_a_change,
        by_time,
        by_time_in_slow_steps,
    ):
        scenario(f"{folder}/{scenario.__name__}", rank)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
