"""Keep data loader workers alive after a SIGTERM, so that the trainer can still save.

torchrun and Slurm send SIGTERM to whole process groups. The signal would end PyTorch's workers. The
trainer would then receive an exception in the middle of its step, before it can save.

`outlive_sigterm` protects the workers of a single loader, in any process. `spare_workers` protects
the workers of every loader in a process under a supervisor. These workers ignore SIGTERM, and the
trainer ends them with SIGKILL.
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
    """Return a `worker_init_fn` for DataLoader that delays a worker's end after a SIGTERM.

    A SIGTERM from the trainer ends the worker at once. A SIGTERM from another process ends the
    worker after `grace_s`. The sender is sometimes unknown, because in a worker that is not forked,
    a library's thread may receive the signal. The delay applies then, too. Programs that the worker
    starts ignore SIGTERM, so they must be ended with SIGKILL. The returned function can be pickled
    if `worker_init_fn` can.

    Args:
        grace_s: seconds that the worker continues; use `sigterm_grace_s` of the `Checkpointer`.
        worker_init_fn: the loader's own initialization function, which is called, too.

    Raises:
        BadUse: `grace_s` is not above 0.
    """
    check_above_zero("grace_s", grace_s)
    return functools.partial(_outlive_sigterm, grace_s, worker_init_fn)


def spare_workers() -> None:
    """Make DataLoader workers that this process starts from now on ignore SIGTERM."""
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
    # A handler is used because programs that the worker starts would inherit a blocked or ignored
    # signal.
    signal.signal(signal.SIGTERM, _disregard)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_heed_sigterm)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _disregard(_number: int, _frame: FrameType | None) -> None:
    """Ignore a SIGTERM."""


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
    # Threads that libraries have already started do not block the signal, so the handler forwards
    # it to the listener.
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
    """Set the attribute `name` of `owner` to `by` inside the block, and restore it afterwards."""
    attributes = vars(owner)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = by
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(own)
