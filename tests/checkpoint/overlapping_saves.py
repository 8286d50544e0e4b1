"""Make saves that last while the test goes on, and read their checkpoints."""

import os
import signal
from contextlib import contextmanager

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


@contextmanager
def writing_stopped(ckpt):
    """Stop the writing process, which `ckpt` has yet to start, until the end of the block."""
    writer, start = ckpt._engine._writer, ckpt._engine._writer._start

    def start_stopped():
        start()
        os.kill(writer.pid, signal.SIGSTOP)  # before any save is requested of it

    writer._start = start_stopped
    try:
        yield
    finally:
        with writer._lock:
            writer._start = start
            if writer.pid is not None:
                os.kill(writer.pid, signal.SIGCONT)


def overlapping(folder, **options):
    """Return a Checkpointer that copies beside the training, which has called `before_update`."""
    ckpt = Checkpointer(folder, **options)
    ckpt.before_update()
    return ckpt
