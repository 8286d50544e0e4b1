"""Record a SIGTERM, let the next `save` act on it, and exit after a grace time at the latest."""

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
"""The exit code that shells report for a process that SIGTERM ended: 143."""
_NOTE: Final = bytes([signal.SIGTERM])


class Sigterm:
    """Handle SIGTERM from `install` until `close`.

    The handler only records the signal, and the next call of `save` reads the record. A separate
    thread ends the process after the grace time. The signal wakes this thread even while the main
    thread is in a library's code, such as a collective that waits for a dead rank. So the process
    cannot hang.
    """

    def __init__(self, grace_s: float, on_over: Callable[[], str]) -> None:
        """Create the object; `install` installs the handler.

        Args:
            grace_s: seconds from the signal after which the process ends at the latest.
            on_over: returns the message to log when the grace time ends; must not wait for storage.
        """
        self.received = False
        """True if this process has received SIGTERM."""
        self._grace_s = grace_s
        self._on_over = on_over
        self._previous: Any = signal.SIG_DFL
        self._installed = False
        self._closed = False
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read_fd, True)

    def install(self) -> None:
        """Install the handler; log a warning outside the main thread, where Python forbids it."""
        threading.Thread(target=self._listen, name="holdfast-sigterm", daemon=True).start()
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "SIGTERM ends this process without a save: the Checkpointer was not made in the "
                "main thread. Make it there, or send SIGTERM to another rank, which saves on all."
            )
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        # Python calls a handler only when the main thread next runs Python code. Python writes to
        # this pipe at once.
        taken = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if taken != -1:  # keep the descriptor of other code, such as asyncio
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
        _installed.add(self)

    def take_back(self) -> None:
        """Install the handler again after a trainer has replaced it."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._installed and is_main and not self._closed:
            signal.signal(signal.SIGTERM, self._handle)

    def begin(self) -> None:
        """Start the grace time, unless it runs, because some rank has received the signal."""
        with contextlib.suppress(OSError):  # the pipe is full: the grace time has begun
            os.write(self._write_fd, _NOTE)

    def leave(self) -> NoReturn:
        """Exit this process after its last save; call the previous handler first."""
        previous = self._before()
        if self.received and callable(previous):
            previous(signal.SIGTERM, inspect.currentframe())
        raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Restore the previous handler, unless SIGTERM was received and the grace time runs."""
        if self.received or self._closed:
            return
        self._closed = True
        _installed.discard(self)
        # If the descriptor cannot be given back here, the pipe must stay open. Otherwise, Python
        # would write signals to the next file that is opened under the same number.
        if self._give_back():
            write_fd, self._write_fd = self._write_fd, -1
            os.close(write_fd)

    def forked(self) -> None:
        """Disable the handler in a forked child, since SIGTERM must end a data loader worker."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> bool:
        """Restore the previous handler and descriptor; return False if this thread cannot."""
        if not self._installed:
            return True
        try:
            taken = signal.set_wakeup_fd(-1)
        except ValueError:  # only the main thread may do this
            return False
        if taken == self._write_fd:
            taken = next((each._write_fd for each in _installed), -1)
        if taken != -1:
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before())
        return True

    def _before(self) -> Any:
        """Return the handler that was installed before this one, ignoring those that are closed."""
        previous = self._previous
        while isinstance(owner := getattr(previous, "__self__", None), Sigterm) and owner._closed:
            previous = owner._previous
        return previous or signal.SIG_DFL  # None: a handler in C, which Python cannot restore

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
        received = b""
        while _NOTE not in received:  # Python writes the number of every handled signal
            received = os.read(self._read_fd, 4096)
            if not received:
                os.close(self._read_fd)
                return
        if self._closed:  # another thread closed this object, and the pipe stays open
            return
        time.sleep(self._grace_s)
        _logger.error(
            "SIGTERM: the grace period of %g s is over. %s", self._grace_s, self._on_over()
        )
        os._exit(EXIT_CODE)


_installed: "weakref.WeakSet[Sigterm]" = weakref.WeakSet()


def _after_fork() -> None:
    installed = list(_installed)
    _installed.clear()
    for each in installed:
        each.forked()


os.register_at_fork(after_in_child=_after_fork)
