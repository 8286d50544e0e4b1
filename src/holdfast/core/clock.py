"""Time, injected: everything that waits or stamps takes a `Clock`; tests use `holdfast.testing.FakeClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in one: wall time for records, monotonic time for limits."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch, UTC; for records that people read."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that only ever grow; for limits. On Linux one timeline for all processes of a host."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.time()

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return time.monotonic()
