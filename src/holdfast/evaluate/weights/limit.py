"""A rate that is not exceeded: of an emulated NIC, or of loading in the background."""

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.core.clock import Clock

MIB = 1024 * 1024
_CREDIT_S = 0.05


class Limit:
    """A token bucket: what is taken is over after `bytes / rate`, one taker after another.

    Time lost to a late wake-up, up to `_CREDIT_S`, is made up for.

    Args:
        clock: for the time that has passed.
        mib_s: the rate; None for no limit. May be changed at any time.
        sleep: waits.
    """

    def __init__(
        self,
        clock: Clock,
        mib_s: float | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.mib_s = mib_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock.monotonic_s()

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate."""
        return self.mib_s is not None

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more have passed."""
        if self.mib_s is None:
            return
        now_s = self._clock.monotonic_s()
        self._free_at_s = max(now_s - _CREDIT_S, self._free_at_s) + size_bytes / (self.mib_s * MIB)
        if self._free_at_s > now_s:
            await self._sleep(self._free_at_s - now_s)
