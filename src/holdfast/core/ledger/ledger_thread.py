"""Use a ledger from an event loop without blocking the loop when the ledger's server is silent.

One thread runs all operations, in order. The event loop passes most writes to the thread and
continues at once. For reads, and for writes that must precede an action, the loop waits for a
limited time, or not at all while an operation is stuck. If the ledger's server cannot be reached,
the thread repeats the current operation until it succeeds. The operations behind it stay in the
queue, so that all records are written once and in order.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from holdfast.core.errors import HoldfastError, LedgerError, LedgerUnreachable
from holdfast.core.ledger.ledger import Ledger

WAIT_S = 5.0
"""The longest time that the event loop waits for one operation, in seconds."""
MAX_WAITING = 10_000
"""The most operations in the queue; further operations are dropped."""
CLOSE_S = 10.0
"""Seconds to wait at the end for the queued operations; the event loop is blocked meanwhile."""
REPEAT_S = 0.5
"""Seconds between two attempts to reach the ledger's server."""
T = TypeVar("T")


class LedgerThread:
    """Run the operations of one ledger in a thread; any thread may call the methods."""

    def __init__(self, ledger: Ledger, *, wait_s: float = WAIT_S, close_s: float = CLOSE_S) -> None:
        """Store the ledger and the time limits.

        Until `start`, operations run in the caller's thread.

        Args:
            ledger: the ledger.
            wait_s: the longest wait for one operation, in seconds.
            close_s: the longest wait at the end for all operations, in seconds.
        """
        self._plain = ledger
        self._wait_s = wait_s
        self._close_s = close_s
        self._work: queue.Queue[tuple[Callable[[Ledger], Any], _Answer] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._began_s: float | None = None
        """The time at which the present operation began."""
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.ledger = cast("Ledger", _Routed(self))
        """The same ledger, with each operation run in the thread."""

    def start(self) -> None:
        """Start the thread, and run the operations in the thread from now on.

        If no thread can be started, the operations still run in the caller's thread.
        """
        thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def call(self, use: Callable[[Ledger], T]) -> T:
        """Run an operation after all earlier ones, and return its result.

        Raises:
            LedgerError: the ledger did not answer in time; the thread runs the operation later.
            HoldfastError: the operation failed.
        """
        if self._thread is None:
            return use(self._plain)
        answer = self._put(use, is_awaited=True)
        try:
            return cast("T", answer.future.result(0.0 if self.is_stuck else self._wait_s))
        except TimeoutError:
            answer.is_awaited = False
            raise LedgerError(
                "The ledger does not answer. The run goes on, and its records wait. "
                "Check that the ledger's server runs."
            ) from None

    def later(self, use: Callable[[Ledger], object]) -> None:
        """Pass an operation to the thread without waiting; `take_errors` returns its error.

        Raises:
            HoldfastError: the operation failed, and there is no thread.
        """
        if self._thread is None:
            use(self._plain)
        else:
            self._put(use, is_awaited=False)

    @property
    def is_stuck(self) -> bool:
        """True if the current operation has lasted longer than `wait_s`."""
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > self._wait_s

    def take_errors(self) -> list[str]:
        """Return, once, the errors of the operations whose callers did not wait."""
        found = []
        while not self._errors.empty():
            error = self._errors.get()
            is_plain = isinstance(error, HoldfastError | OSError)
            # A value from a rank may not fit into the database.
            found.append(str(error) if is_plain else f"A record was not written: {error!r}.")
        return found

    def close(self) -> None:
        """End the thread after the queued operations, or after `close_s` seconds at the latest.

        If operations are left, `take_errors` then returns an error with their number.
        """
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                # The queue has the None that ends the thread, but lacks the operation in progress.
                count = self._work.qsize()
                self._errors.put(
                    LedgerError(
                        f"The ledger has not answered for {self._close_s:g} s: the last records of the run are "
                        f"missing ({count} operations). Check that the ledger's server runs."
                    )
                )
            self._thread = None

    def _put(self, use: Callable[[Ledger], Any], *, is_awaited: bool) -> "_Answer":
        answer = _Answer(is_awaited)
        if self._work.qsize() >= MAX_WAITING:
            error = LedgerError(
                "The ledger has not answered for long. Records of the run are lost."
            )
            answer.future.set_exception(error)
            if not is_awaited:
                self._errors.put(error)
        else:
            self._work.put((use, answer))
        return answer

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            use, answer = work
            self._began_s = time.monotonic()
            try:
                answer.future.set_result(self._reach(use))
            except Exception as error:
                answer.future.set_exception(error)
                if not answer.is_awaited:
                    self._errors.put(error)
            self._began_s = None

    def _reach(self, use: Callable[[Ledger], T]) -> T:
        """Run an operation, and repeat it while the ledger's server cannot be reached."""
        try:
            return use(self._plain)
        except LedgerUnreachable as error:
            self._errors.put(LedgerError(f"{error} The run goes on, and its records wait."))
        repeating = self._plain.repeating()
        while True:
            time.sleep(REPEAT_S)
            with contextlib.suppress(LedgerUnreachable):
                return use(repeating)


class _Answer:
    def __init__(self, is_awaited: bool) -> None:
        self.future: Future[Any] = Future()
        self.is_awaited = is_awaited


class _Routed:
    """A ledger whose operations all run through `LedgerThread.call`."""

    def __init__(self, thread: LedgerThread) -> None:
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thread._plain, name)
        if not callable(value):
            return value

        def operate(*args: Any, **kwargs: Any) -> Any:
            return self._thread.call(lambda ledger: getattr(ledger, name)(*args, **kwargs))

        return operate
