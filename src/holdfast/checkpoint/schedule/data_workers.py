"""Keep data loader workers alive after a SIGTERM, so that the trainer can still save.

torchrun and Slurm send SIGTERM to whole process groups. The signal ends PyTorch's workers, which
raises an exception in the middle of the trainer's step, before the trainer saves.

`outlive_sigterm` is for a single loader, in any process. `spare_workers` protects every loader of a
supervised process, whose workers live as long as the trainer; the trainer ends them by SIGKILL.
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
    """Return a `worker_init_fn` for `torch.utils.data.DataLoader` that delays the end by SIGTERM.

    A SIGTERM from the trainer ends the worker at once. A SIGTERM from another sender ends the
    worker after `grace_s`. The delay also applies if the sender is unknown: in a worker that is not
    forked, a library's thread may receive the signal. Programs that the worker starts ignore
    SIGTERM: end them by SIGKILL. The result can be pickled if `worker_init_fn` can.

    Args:
        grace_s: seconds, as `sigterm_grace_s` of `Checkpointer`.
        worker_init_fn: a function that the returned function calls as well.

    Raises:
        BadUse: `grace_s` is not above 0.
    """
    check_above_zero("grace_s", grace_s)
    return functools.partial(_outlive_sigterm, grace_s, worker_init_fn)


def spare_workers() -> None:
    """Make the workers of every DataLoader that this process starts from now on ignore SIGTERM."""
    # Imported here, since the catalog imports this module and needs no torch.
    from torch.utils.data import dataloader

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
            # PyTorch and multiprocessing end workers by SIGTERM: use SIGKILL instead.
            worker.terminate, worker._popen.terminate = worker.kill, worker._popen.kill

    iterator.__init__ = begin_spared


def _disregard_sigterm(worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    # Use a handler: programs that the worker starts would inherit a blocked signal or SIG_IGN.
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
    # Only sigwaitinfo of a blocked signal returns the sender.
    listener = threading.Thread(
        target=_listen, args=(grace_s, trainer.pid), name="holdfast-sigterm", daemon=True
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listener.start()
    # Threads that libraries started before do not block the signal: forward it to the listener.
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
    """Set the attribute `name` of `owner` to `by` within the block, and restore it afterwards."""
    attributes = vars(owner)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = by
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(own)
