"""Limit the bytes per second that threads or tasks of an event loop write, send or read."""

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

CATCH_UP_S: Final = 0.05
"""The longest late wake-up of an event loop for which `AsyncRateLimit` makes up."""


async def _sleep(seconds: float) -> None:
    import asyncio  # here, since a process without an event loop need not spend the import time

    await asyncio.sleep(seconds)


class _Turns:
    """Let callers take turns: each turn lasts as long as the caller's bytes take at `max_bytes_s`.

    Args:
        max_bytes_s: the rate; None: no limit. The rate may be changed at any time.
        now_s: returns monotonic seconds.
        catch_up_s: a turn may begin up to so many seconds before the call, if earlier turns had
            ended by then.
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
        """Take the next turn; return the seconds until its begin and its end (negative: past)."""
        with self._taking_turns:
            now_s = self._now_s()
            begin_s = max(self._free_at_s, now_s - self._catch_up_s)
            self._free_at_s = end_s = begin_s + size_bytes / max_bytes_s
        return begin_s - now_s, end_s - now_s


class RateLimit(_Turns):
    """Limit all threads together to `max_bytes_s`; None: no limit.

    The limit holds across files and saves. Each caller waits for the turns of all earlier callers,
    so at any time at most one chunk is above the rate.
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
        """Wait until the turn of these bytes begins."""
        if self.max_bytes_s is None:
            return
        begins_in_s, _ = self._take_turn(size_bytes, self.max_bytes_s)
        if begins_in_s > 0:
            self._sleep(begins_in_s)


class AsyncRateLimit(_Turns):
    """Limit all tasks of an event loop together to `max_bytes_s`; None: no limit.

    Each caller waits until its own turn has ended. A late wake-up of up to `CATCH_UP_S` seconds
    does not lower the rate: the next turn begins earlier.
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
        """Wait until the turn of these bytes has ended."""
        if self.max_bytes_s is None:
            return
        _, ends_in_s = self._take_turn(size_bytes, self.max_bytes_s)
        if ends_in_s > 0:
            await self._sleep(ends_in_s)
