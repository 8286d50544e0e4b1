"""SIGTERM as a wish to stop: noted at once, acted on by the next `save`, and by force when the grace time is over."""

import contextlib
import inspect
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

_logger = logging.getLogger("holdfast")
EXIT_CODE: Final = 128 + signal.SIGTERM
"""What a shell says of a process that SIGTERM ended: 143."""
_NOTE: Final = bytes([signal.SIGTERM])


class Sigterm:
    """Listens for SIGTERM from `install` to `close`; the handler that was there before comes last, in `leave`.

    The handler only takes note. A thread hears of the signal even while the main thread is in a library's code, such as
    a collective that a dead rank holds up, and ends the process when the time is over: it never hangs.
    """

    def __init__(self, grace_s: float, on_over: Callable[[], str]) -> None:
        """Nothing is listened for yet.

        Args:
            grace_s: seconds from the signal to the end of the process, at the latest.
            on_over: what to log when they are over; it may not wait for storage.
        """
        self.received = False
        """Whether this process got the signal."""
        self._grace_s = grace_s
        self._on_over = on_over
        self._previous: Any = signal.SIG_DFL
        self._installed = False
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read_fd, True)

    def install(self) -> None:
        """Take over SIGTERM, or log that it cannot be: only the main thread may."""
        threading.Thread(target=self._listen, name="holdfast-sigterm", daemon=True).start()
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "SIGTERM ends this process without a save: the Checkpointer was not made in the main thread. "
                "Make it there, or send SIGTERM to another rank, which saves on all."
            )
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        # Python's handler waits for the main thread to be in Python's code; this does not.
        taken = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if taken != -1:  # asyncio's, say
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
        _installed.add(self)

    def begin(self) -> None:
        """The grace time begins, unless it has: this rank or another one got the signal."""
        with contextlib.suppress(OSError):  # full: it has begun
            os.write(self._write_fd, _NOTE)

    def leave(self) -> NoReturn:
        """End this process: the state is safe, or cannot be saved."""
        if self.received and callable(self._previous):
            self._previous(signal.SIGTERM, inspect.currentframe())
        raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Give SIGTERM back. Where it has come already, the time still runs, whatever the script does at its end."""
        if self.received or self._write_fd == -1:
            return
        is_main = threading.current_thread() is threading.main_thread()
        if self._installed and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            self._give_back()
        self._installed = False
        _installed.discard(self)
        write_fd, self._write_fd = self._write_fd, -1
        os.close(write_fd)

    def forked(self) -> None:
        """This process is a child of the one that installed it: a worker of a data loader is ended by SIGTERM."""
        self._installed = False
        with contextlib.suppress(ValueError):  # forked by another thread than the main one
            self._give_back()

    def _give_back(self) -> None:
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)  # None: a handler in C, which is lost
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._write_fd):
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        self.begin()

    def _listen(self) -> None:
        heard = b""
        while _NOTE not in heard:  # each signal that Python handles leaves its number
            heard = os.read(self._read_fd, 4096)
            if not heard:
                os.close(self._read_fd)
                return
        time.sleep(self._grace_s)
        _logger.error("SIGTERM: %g s of grace are over. %s", self._grace_s, self._on_over())
        os._exit(EXIT_CODE)


_installed: "weakref.WeakSet[Sigterm]" = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_installed):
        each.forked()
    _installed.clear()


os.register_at_fork(after_in_child=_after_fork)
