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
        self._closed = False
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

    def take_back(self) -> None:
        """Listen again, where a trainer has put a handler of its own in the place of this one."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._installed and is_main and not self._closed:
            signal.signal(signal.SIGTERM, self._handle)

    def begin(self) -> None:
        """The grace time begins, unless it has: this rank or another one got the signal."""
        with contextlib.suppress(OSError):  # full: it has begun
            os.write(self._write_fd, _NOTE)

    def leave(self) -> NoReturn:
        """End this process: the state is safe, or cannot be saved."""
        previous = self._before()
        if self.received and callable(previous):
            previous(signal.SIGTERM, inspect.currentframe())
        raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Give SIGTERM back. Where it has come already, the time still runs, whatever the script does at its end."""
        if self.received or self._closed:
            return
        self._closed = True
        _installed.discard(self)
        if (
            self._give_back()
        ):  # else the pipe stays: signals would be written into whatever file gets its number
            write_fd, self._write_fd = self._write_fd, -1
            os.close(write_fd)

    def forked(self) -> None:
        """This process is a child of the one that installed it: a worker of a data loader is ended by SIGTERM."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> bool:
        """Whether no signal is written to the pipe any more; who still calls the handler is passed on by that."""
        if not self._installed:
            return True
        try:
            taken = signal.set_wakeup_fd(-1)
        except ValueError:  # only the main thread may
            return False
        if taken == self._write_fd:
            taken = next((each._write_fd for each in _installed), -1)
        if taken != -1:
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before())
        return True

    def _before(self) -> Any:
        """The handler that was there before this one and those that are closed."""
        previous = self._previous
        while isinstance(owner := getattr(previous, "__self__", None), Sigterm) and owner._closed:
            previous = owner._previous
        return previous or signal.SIG_DFL  # None: a handler in C, which is lost

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._closed:
            self.received = True
            self.begin()
        elif callable(previous := self._before()):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _listen(self) -> None:
        heard = b""
        while _NOTE not in heard:  # each signal that Python handles leaves its number
            heard = os.read(self._read_fd, 4096)
            if not heard:
                os.close(self._read_fd)
                return
        if self._closed:  # by another thread than the main one: nobody reads on
            return
        time.sleep(self._grace_s)
        _logger.error("SIGTERM: %g s of grace are over. %s", self._grace_s, self._on_over())
        os._exit(EXIT_CODE)


_installed: "weakref.WeakSet[Sigterm]" = weakref.WeakSet()


def _after_fork() -> None:
    installed = list(_installed)
    _installed.clear()
    for each in installed:
        each.forked()


os.register_at_fork(after_in_child=_after_fork)
