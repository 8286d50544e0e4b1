"""Limit the bytes per second that threads, or tasks of an event loop, write, send or read."""

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

CATCH_UP_S: Final = 0.05
"""The longest delay of an event loop, in seconds, for which `AsyncRateLimit` compensates."""


async def _sleep(seconds: float) -> None:
    import asyncio  # here, since a process without an event loop need not spend the import time

    await asyncio.sleep(seconds)


class _Turns:
    """Assign a turn to each caller; a turn takes the time of the caller's bytes at `max_bytes_s`.

    Args:
        max_bytes_s: the rate in bytes per second; None: no limit. The rate may be changed at any
            time.
        now_s: returns monotonic seconds.
        catch_up_s: a turn may begin up to this many seconds before the call, if the earlier turns
            had ended by then.
    """

    def __init__(
        self, max_bytes_s: float | None, now_s: Callable[[], float], catch_up_s: float
    ) -> None:
        self.max_bytes_s = max_bytes_s
        self._now_s = now_s
        self._catch_up_s = catch_up_s
        self._free_at_s = now_s()
        self._taking_turns = threading.Lock()

    @property
    def is_limited(self) -> bool:
        """True if there is a limit."""
        return self.max_bytes_s is not None

    def _take_turn(self, size_bytes: int, max_bytes_s: float) -> tuple[float, float]:
        """Take the next turn; return the seconds from now to its start and to its end.

        A negative value means that the time has passed.
        """
        with self._taking_turns:
            now_s = self._now_s()
            begin_s = max(self._free_at_s, now_s - self._catch_up_s)
            self._free_at_s = end_s = begin_s + size_bytes / max_bytes_s
        return begin_s - now_s, end_s - now_s


class RateLimit(_Turns):
    """Limit the total rate of all threads to `max_bytes_s` bytes per second; None: no limit.

    The limit holds across files and saves. Each caller waits until the turns of all earlier callers
    have ended, so the total is at most one chunk above the limit at any time.
    """

    def __init__(
        self,
        max_bytes_s: float | None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(max_bytes_s, now_s, catch_up_s=0.0)
        self._sleep = sleep

    def wait(self, size_bytes: int) -> None:
        """Wait until the caller's turn to write or send `size_bytes` bytes begins."""
        if self.max_bytes_s is None:
            return
        begins_in_s, _ = self._take_turn(size_bytes, self.max_bytes_s)
        if begins_in_s > 0:
            self._sleep(begins_in_s)


class AsyncRateLimit(_Turns):
    """Limit the total rate of all tasks of an event loop to `max_bytes_s`; None: no limit.

    Each caller waits until its own turn has ended. If the event loop wakes a caller up to
    `CATCH_UP_S` seconds late, the next turn begins earlier, so that the rate stays the same.
    """

    def __init__(
        self,
        max_bytes_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = _sleep,
    ) -> None:
        super().__init__(max_bytes_s, now_s, catch_up_s=CATCH_UP_S)
        self._sleep = sleep

    async def wait(self, size_bytes: int) -> None:
        """Wait until the caller's turn to write or send `size_bytes` bytes has ended."""
        if self.max_bytes_s is None:
            return
        _, ends_in_s = self._take_turn(size_bytes, self.max_bytes_s)
        if ends_in_s > 0:
            await self._sleep(ends_in_s)
