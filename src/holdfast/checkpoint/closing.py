"""Close a Checkpointer by a call, at the end of the script, or when no reference to it remains.

A Checkpointer is also closed when another one of the same process takes over its folder.

`Work` holds the threads, processes and records of a Checkpointer, apart from the object that the
user holds. When the user drops that object, `Work` still exists and can be closed, so that the last
save becomes durable.
"""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.checkpoint.catalog.set_aside import is_of_others, is_own, set_aside
from holdfast.checkpoint.catalog.writer_lease import Identity, WriterLease, acquire
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.rank_agreement import Votes
from holdfast.checkpoint.save.engine import Engine
from holdfast.checkpoint.save.results import Outcomes
from holdfast.checkpoint.schedule.sigterm import EXIT_CODE, Sigterm
from holdfast.checkpoint.storage.uploader import Pusher
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.link import job_link

_logger = logging.getLogger("holdfast")
_DROPPED_WAIT_S: Final = 30.0
"""Seconds to wait for the last save when a Checkpointer is dropped; the save then continues."""


@dataclass(eq=False, kw_only=True)
class Work:
    """Hold the threads, processes and records of one Checkpointer.

    Attributes:
        folder: the checkpoint folder.
        identity: the identity of the run.
        is_fresh: whether to move checkpoints of other runs into `aside-N` before the first save.
        timeout_s: seconds to wait for the last save of the process that wrote before this one.
        engine: the engine that makes the saves.
        votes: the votes by which all ranks decide together whether to save.
        outcomes: the record of how each save ended.
        pusher: the client of the process that uploads to object storage, if there is one.
        sigterm: the handler of SIGTERM, if there is one.
        pid: the id of the process that started the parts. A process forked from that one must not
            close them.
        lease: the exclusive right to save into the folder; on rank 0 only.
        is_closed: whether the Checkpointer is closed or being closed.
        taken_over: whether another Checkpointer of this process has taken over.
    """

    folder: Path
    identity: Identity
    is_fresh: bool
    timeout_s: float
    engine: Engine
    votes: Votes
    outcomes: Outcomes
    pusher: Pusher | None
    sigterm: Sigterm | None = None
    pid: int | None = None
    lease: WriterLease | None = None
    is_closed: bool = False
    taken_over: bool = False
    _holds_in: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_another_s(self) -> bool:
        """Return True if this process was forked from the process that started the parts."""
        return self.pid not in (None, os.getpid())

    def close(self, *, in_good_order: bool, awaits_push: bool | None = None) -> None:
        """Wait for every save in flight, and close all parts. A second call does nothing.

        Args:
            in_good_order: whether training is over. If not, the last snapshot stays in memory for
                the process that restarts the training.
            awaits_push: whether to wait until the newest checkpoint is uploaded; None for the value
                of `in_good_order`.

        Raises:
            SaveFailed: a save is not durable, and no call has reported the failure yet.
        """
        if self.is_another_s or self.is_closed:
            return
        self.is_closed = True
        # All parts are closed, from the last to the first, even if one fails.
        with contextlib.ExitStack() as parts:
            parts.callback(self._has_ended)
            if self.sigterm is not None:
                parts.callback(self.sigterm.close)
            parts.enter_context(job_link().section("save"))
            parts.callback(self.outcomes.retry.close)
            parts.callback(self.votes.close)
            if self.pusher is not None:
                parts.callback(
                    self.pusher.close, wait=in_good_order if awaits_push is None else awaits_push
                )
            parts.callback(self.engine.close, in_good_order=in_good_order)
        self.outcomes.raise_unseen()
        self.outcomes.raise_unmade()

    def _has_ended(self) -> None:
        if self.lease is not None:
            self.lease.release()
        if _writing.get(self._key) is self:
            del _writing[self._key]
        self._ended.set()

    def hold(self, ranks: Ranks) -> None:
        """Acquire the exclusive right to save into the folder, once. Collective.

        Raises:
            BadUse: another process has the right, or the folder holds checkpoints of another run,
                or these checkpoints cannot be moved aside.
        """
        if self._holds_in == os.getpid():
            return
        if self.is_fresh and not ranks.first(lambda: is_own(self.folder, self.identity)):
            self.begin_writing()  # closes an older Checkpointer, so that no save follows the move
        self.engine.lease = ranks.first_at_length(self._acquire)
        self.engine.run = self.identity.run
        self._holds_in = os.getpid()

    def _acquire(self) -> str:
        who, folder = self.identity, self.folder

        def begin_again() -> None:
            if is_of_others(folder, who):
                set_aside(folder)

        try:
            aside = begin_again if self.is_fresh else None
            lease = self.lease = acquire(
                folder, who, now_s=time.time(), timeout_s=self.timeout_s, set_aside=aside
            )
        except OSError as error:  # if a save fails for the same reason, it raises the error
            if self.is_fresh and is_of_others(folder, who):
                raise BadUse(
                    f"The checkpoints of {folder} could not be set aside: {error}. Make them writable or move them "
                    "away, or give this run another folder."
                ) from error
            _logger.warning(
                "Another process that saves into %s cannot be detected: %s", folder, error
            )
            return ""
        return lease.holder.token

    def begin_writing(self) -> None:
        """Close the other Checkpointer of this process for the same folder, if there is one.

        Raises:
            BadUse: a newer Checkpointer has closed this one in the same way.
        """
        self.check_not_taken_over()
        former = _writing.get(self._key)
        if former is self:
            return
        if former is not None and not former.is_another_s:
            if not former.is_closed:
                _logger.warning(
                    "This Checkpointer takes over %s from another one of this process, which is closed.",
                    self.folder,
                )
            former.taken_over = True
            _close_quietly(former)
            former._ended.wait()  # another thread may be closing `former`
        _writing[self._key] = self

    def check_not_taken_over(self) -> None:
        """Check that no other Checkpointer has begun to save into the folder.

        Raises:
            BadUse: another Checkpointer of this process has taken over.
        """
        if self.taken_over:
            raise BadUse(
                f"Another Checkpointer of this process has taken over {self.folder}, and this one is closed. Save with "
                "the newer one, or give this one another folder."
            )

    @property
    def _key(self) -> str:
        return os.path.realpath(self.folder)


_writing: dict[str, Work] = {}
"""The `Work` that saves into each folder in this process, by the folder's real path."""
os.register_at_fork(after_in_child=_writing.clear)


def close_at_exit(work: Work) -> functools.partial[None]:
    """Register `work` to be closed when the script ends, and return the registered function.

    The function closes `work` when called. Pass it to `atexit.unregister` to cancel the
    registration.
    """
    closer = functools.partial(_at_exit, weakref.ref(work))
    atexit.register(closer)
    return closer


def close_when_dropped(holder: object, work: Work, closer: functools.partial[None]) -> None:
    """Close `work` when `holder`, the only object through which the user can save, is dropped."""
    weakref.finalize(holder, _dropped, work, closer).atexit = False


def is_good_order(error: BaseException | None) -> bool:
    """Return True if the exception `error`, or None, means that training will not be restarted.

    Training is not restarted if it has finished, or if it was stopped on request.
    """
    if isinstance(error, SystemExit):
        return error.code in (None, 0, EXIT_CODE)
    return not isinstance(error, Exception)


def _at_exit(work: "weakref.ref[Work]") -> None:
    """Close `work` when the script ends without closing it; log a failure of the last save."""
    if (open_still := work()) is None:
        return
    try:
        open_still.close(in_good_order=is_good_order(getattr(sys, "last_value", None)))
    except HoldfastError as error:
        _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback


def _dropped(work: Work, closer: functools.partial[None]) -> None:
    """Close `work` in a separate thread.

    The garbage collector calls this function in any thread, even in one of Holdfast's own threads.
    That thread may hold a lock that `Work.close` needs, so closing there could deadlock.
    """
    if work.is_another_s:
        return
    atexit.unregister(closer)
    if work.is_closed:
        return
    if work.sigterm is not None and threading.current_thread() is threading.main_thread():
        work.sigterm.close()  # only this thread can close the handler
    thread = threading.Thread(target=_close_quietly, args=(work,), name="holdfast-close")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or no thread can be started
        _close_quietly(work)
        return
    if not threading.current_thread().name.startswith("holdfast"):
        thread.join(_DROPPED_WAIT_S)


def _close_quietly(work: Work) -> None:
    """Close `work` and log a failure, since there is no caller to raise the error to.

    The upload process continues in the background, because a script that drops or replaces a
    Checkpointer must not wait for object storage.
    """
    try:
        work.close(in_good_order=True, awaits_push=False)
    except HoldfastError as error:
        _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback
