"""A limit to the rate at which bytes are written, sent or read, for threads and for tasks of an event loop."""

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

CATCH_UP_S: Final = 0.05
"""Time lost to late wake-ups of an event loop that `AsyncRateLimit` makes up for."""


async def _sleep(seconds: float) -> None:
    import asyncio  # a process without an event loop does without the time to import one

    await asyncio.sleep(seconds)


class _Turns:
    """The turns of callers, one after another, each as long as its bytes take at `max_bytes_s`.

    Args:
        max_bytes_s: the rate; None for no limit. May be changed at any time.
        now_s: the time, monotonic.
        catch_up_s: a turn may begin this long before the call if the turns before it have ended by then.
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
        """Whether there is a rate."""
        return self.max_bytes_s is not None

    def _take_turn(self, size_bytes: int, max_bytes_s: float) -> tuple[float, float]:
        """Take the next turn; return in how many seconds the turn begins and ends, negative for the past."""
        with self._taking_turns:
            now_s = self._now_s()
            begin_s = max(self._free_at_s, now_s - self._catch_up_s)
            self._free_at_s = end_s = begin_s + size_bytes / max_bytes_s
        return begin_s - now_s, end_s - now_s


class RateLimit(_Turns):
    """Holds all threads together to `max_bytes_s`, from one file and one save to the next; None: as fast as it goes.

    What comes waits for what came before it, so that in any stretch of time the rate is exceeded by one chunk at most.
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
        """Wait until the turn of `size_bytes` more begins."""
        if self.max_bytes_s is None:
            return
        begins_in_s, _ = self._take_turn(size_bytes, self.max_bytes_s)
        if begins_in_s > 0:
            self._sleep(begins_in_s)


class AsyncRateLimit(_Turns):
    """Holds all tasks of an event loop together to `max_bytes_s`; None: as fast as it goes.

    A turn is over after `bytes / rate`, one caller after another. Time lost to a late wake-up, up to `CATCH_UP_S`, is
    made up for.
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
        """Wait until the turn of `size_bytes` more has ended."""
        if self.max_bytes_s is None:
            return
        _, ends_in_s = self._take_turn(size_bytes, self.max_bytes_s)
        if ends_in_s > 0:
            await self._sleep(ends_in_s)
