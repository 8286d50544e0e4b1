"""Make saves that last while the test goes on, and read their checkpoints."""

import torch

from holdfast.checkpoint import Checkpointer, scan

MIB = 1 << 20


def restored(folder, state):
    Checkpointer(folder).restore(state)
    return state


def steps_in(folder):
    return [info.step for info in scan(folder)]


def large(value, mib=33):
    """Return a state of three chunks, so that a rate limit always delays the last chunk."""
    return {"large": torch.full((mib * MIB // 4,), float(value)), "value": value}


def slow(folder, seconds, **options):
    """Return a Checkpointer that takes at least `seconds` for each save of `large`."""
    return Checkpointer(folder, max_write_mib_s=16 / seconds, **options)


def overlapping(folder, **options):
    """Return a Checkpointer that copies beside the training, which has called `before_update`."""
    ckpt = Checkpointer(folder, **options)
    ckpt.before_update()
    return ckpt
