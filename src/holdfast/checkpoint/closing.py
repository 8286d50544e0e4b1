"""How a Checkpointer comes to its end: closed, at the end of the script, dropped without a word, or taken over from.

What it has at work is held here, apart from the object that the user holds: so that object can be dropped, and what it
had at work is closed, its last save durable.
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

from holdfast.checkpoint.aside import is_of_others, is_own, set_aside
from holdfast.checkpoint.engine import Engine
from holdfast.checkpoint.lease import Identity, WriterLease, acquire
from holdfast.checkpoint.outcomes import Outcomes
from holdfast.checkpoint.pushing import Pusher
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.sigterm import EXIT_CODE, Sigterm
from holdfast.checkpoint.votes import Votes
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.link import job_link

_logger = logging.getLogger("holdfast")
_DROPPED_WAIT_S: Final = 30.0
"""Whoever drops it waits so long for its last save, which goes on being written after that."""


@dataclass(eq=False, kw_only=True)
class Work:
    """What one Checkpointer has at work.

    Attributes:
        folder: of the checkpoints.
        identity: of its run.
        is_fresh: checkpoints of other runs are set aside.
        timeout_s: how long the last save of a former writer may take.
        engine: its saves.
        votes: of all ranks.
        outcomes: of its saves.
        pusher: where it pushes.
        sigterm: where it listens for that.
        pid: the process that it is at work in. One that is forked from that must not end what belongs there.
        lease: the right to save, on rank 0.
        is_closed: it is, or is being closed.
        taken_over: by another Checkpointer of this process.
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
        """Whether it is at work in another process, from which this one was forked."""
        return self.pid not in (None, os.getpid())

    def close(self, *, in_good_order: bool, awaits_push: bool | None = None) -> None:
        """Wait for every save in flight, and let go of all.

        Args:
            in_good_order: nothing is to be kept for a successor.
            awaits_push: whether to wait until the newest checkpoint is in storage; None: where it is in good order.

        Raises:
            SaveFailed: one is not durable, and nobody was told.
        """
        if self.is_another_s or self.is_closed:
            return
        self.is_closed = True
        with contextlib.ExitStack() as parts:  # each is closed, from the last to the first, though another one fails
            parts.callback(self._has_ended)
            if self.sigterm is not None:
                parts.callback(self.sigterm.close)
            parts.enter_context(job_link().section("save"))
            parts.callback(self.outcomes.retry.close)
            parts.callback(self.votes.close)
            if self.pusher is not None:
                parts.callback(self.pusher.close, wait=in_good_order if awaits_push is None else awaits_push)
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
        """Take the right to save into the folder, once. Collective.

        Raises:
            BadUse: another process has it, or the checkpoints there are another run's, or cannot be set aside.
        """
        if self._holds_in == os.getpid():
            return
        if self.is_fresh and not ranks.first(lambda: is_own(self.folder, self.identity)):
            self.begin_writing()  # an older one must not save what is not set aside
        self.engine.lease = ranks.first_at_length(self._acquire)
        self.engine.run = self.identity.run
        self._holds_in = os.getpid()

    def _acquire(self) -> str:
        who, folder = self.identity, self.folder

        def begin_anew() -> None:
            if is_of_others(folder, who):
                set_aside(folder)

        try:
            aside = begin_anew if self.is_fresh else None
            lease = self.lease = acquire(folder, who, now_s=time.time(), timeout_s=self.timeout_s, set_aside=aside)
        except OSError as error:  # a save there says so, too, if it fails
            if self.is_fresh and is_of_others(folder, who):
                raise BadUse(
                    f"The checkpoints of {folder} could not be set aside: {error}. Make them writable or move them "
                    "away, or give this run another folder."
                ) from error
            _logger.warning("Another process that saves into %s would not be noticed: %s", folder, error)
            return ""
        return lease.holder.token

    def begin_writing(self) -> None:
        """Take over from another Checkpointer of this process that saves into the folder, if there is one.

        Raises:
            BadUse: another one has taken over from this one.
        """
        self.check_not_taken_over()
        former = _writing.get(self._key)
        if former is self:
            return
        if former is not None and not former.is_another_s:
            if not former.is_closed:
                _logger.warning(
                    "This Checkpointer takes over %s from another one of this process, which is closed.", self.folder
                )
            former.taken_over = True
            _close_quietly(former, awaits_push=False)
            former._ended.wait()  # another thread may be at it
        _writing[self._key] = self

    def check_not_taken_over(self) -> None:
        """Refuse to go on once another Checkpointer has begun to save into the folder.

        Raises:
            BadUse: it has.
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
"""Of this process, by folder: what saves into it."""
os.register_at_fork(after_in_child=_writing.clear)


def close_at_exit(work: Work) -> functools.partial[None]:
    """Close it at the end of the script; what is returned does so now, and is what `atexit` has to let go."""
    closer = functools.partial(_at_exit, weakref.ref(work))
    atexit.register(closer)
    return closer


def close_when_dropped(holder: object, work: Work, closer: functools.partial[None]) -> None:
    """Close it once `holder`, the only one who can save with it, is dropped."""
    weakref.finalize(holder, _dropped, work, closer).atexit = False


def is_good_order(error: BaseException | None) -> bool:
    """Whether a training that ends with `error` has come to its end, or was asked to, and is not to be gone on with."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, EXIT_CODE)
    return not isinstance(error, Exception)


def _at_exit(work: "weakref.ref[Work]") -> None:
    """A script that ends without closing it has its last save, or is told."""
    if (open_still := work()) is None:
        return
    try:
        open_still.close(in_good_order=is_good_order(getattr(sys, "last_value", None)))
    except HoldfastError as error:
        _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback


def _dropped(work: Work, closer: functools.partial[None]) -> None:
    """In a thread of its own: whoever collects garbage may be any thread, one of ours too, and hold any lock."""
    if work.is_another_s:
        return
    atexit.unregister(closer)
    if work.is_closed:
        return
    if work.sigterm is not None and threading.current_thread() is threading.main_thread():
        work.sigterm.close()  # which only this thread can
    thread = threading.Thread(target=_close_quietly, args=(work,), name="holdfast-close")
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or no thread is left
        _close_quietly(work)
        return
    if not threading.current_thread().name.startswith("holdfast"):
        thread.join(_DROPPED_WAIT_S)


def _close_quietly(work: Work, *, awaits_push: bool = True) -> None:
    """Close it where nobody is there to hear of a failure but the log."""
    try:
        work.close(in_good_order=True, awaits_push=awaits_push)
    except HoldfastError as error:
        _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback
