"""Workers of a data loader that outlive a SIGTERM, so that the trainer that got it too can save.

torchrun and Slurm send SIGTERM to whole process groups. A worker of PyTorch's dies of it, of which the trainer hears by
an exception in the midst of its step, before it saves.

`outlive_sigterm` is for a loader, whose trainer may be anybody's. `spare_workers` does it for every loader of a
supervised process: there a worker lives as long as its trainer, which ends it by SIGKILL.
"""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.checkpoint.schedule.sigterm import EXIT_CODE
from holdfast.core.arguments import check_above_zero


def outlive_sigterm(
    grace_s: float, worker_init_fn: Callable[[int], object] | None = None
) -> "functools.partial[None]":
    """A `worker_init_fn` for `torch.utils.data.DataLoader`; it can be pickled if the one it calls can.

    SIGTERM ends a worker at once if its trainer sends it, and `grace_s` seconds later if somebody else does, or if that
    cannot be told: a worker that is not forked has threads of libraries that may get it instead. Programs that the
    worker starts do not hear it: end them by SIGKILL.

    Args:
        grace_s: as `sigterm_grace_s` of `Checkpointer`.
        worker_init_fn: is called as well.

    Raises:
        BadUse: `grace_s` is not above 0.
    """
    check_above_zero("grace_s", grace_s)
    return functools.partial(_outlive_sigterm, grace_s, worker_init_fn)


def spare_workers() -> None:
    """Have the workers of every DataLoader that this process starts from now on outlive SIGTERM."""
    from torch.utils.data import (
        dataloader,
    )  # the catalog, which imports this module, needs no torch

    _spare(dataloader._MultiProcessingDataLoaderIter)
    stateful = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    if stateful is not None:
        _spare(stateful._StatefulMultiProcessingDataLoaderIter)


@functools.cache
def _spare(iterator: Any) -> None:
    begin = iterator.__init__

    @functools.wraps(begin)
    def begin_spared(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        init_fn = functools.partial(_disregard_sigterm, loader.worker_init_fn)
        with replaced(loader, "worker_init_fn", init_fn):
            begin(self, loader, *args, **kwargs)
        for worker in self._workers:
            # PyTorch ends a worker that does not leave, and multiprocessing every daemon, by SIGTERM.
            worker.terminate, worker._popen.terminate = worker.kill, worker._popen.kill

    iterator.__init__ = begin_spared


def _disregard_sigterm(worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    # A handler, and no blocked mask or SIG_IGN: a program that the worker starts begins with the default action.
    signal.signal(signal.SIGTERM, _disregard)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_heed_sigterm)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _disregard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing on SIGTERM."""


def _heed_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _disregard:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outlive_sigterm(
    grace_s: float, worker_init_fn: Callable[[int], object] | None, worker: int
) -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "this is a worker"
    # Only who waits for a signal that is blocked is told who sent it.
    listener = threading.Thread(
        target=_listen, args=(grace_s, trainer.pid), name="holdfast-sigterm", daemon=True
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listener.start()
    # Threads that libraries have started before do not block it; what they get is passed on, and seems its own.
    signal.signal(
        signal.SIGTERM, lambda *_: signal.pthread_kill(listener.ident or 0, signal.SIGTERM)
    )
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _listen(grace_s: float, trainer_pid: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer_pid:
        after_grace = threading.Timer(grace_s, os._exit, (EXIT_CODE,))
        after_grace.daemon = True
        after_grace.start()
    os._exit(EXIT_CODE)


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Within the block `owner` has `by` under `name`; afterwards what it had, its own or its class's."""
    attributes = vars(owner)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = by
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(own)
