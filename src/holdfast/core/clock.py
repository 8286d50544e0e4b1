"""Time, injected: everything that waits or stamps takes a `Clock`; tests use `holdfast.testing.FakeClock`."""

import time
from collections.abc import Callable
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


def elapsed_s() -> float:
    """Return seconds that only ever grow. On Linux they grow while the machine is suspended, too."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def wall_offset_s() -> float:
    """Return the present difference of the wall clock and `elapsed_s`, in seconds."""
    return time.time() - elapsed_s()


class SteadyClock:
    """Clocks whose wall time does not jump: the machine's wall clock is read once.

    So the distances between the records of a run stay true if the wall clock is set meanwhile.
    """

    def __init__(
        self,
        offset_s: float,
        *,
        elapsed_s: Callable[[], float] = elapsed_s,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an offset.

        Args:
            offset_s: see `wall_offset_s`; the same for all processes of a host that must agree.
            elapsed_s: returns seconds that only ever grow.
            monotonic_s: returns the seconds for limits.
        """
        self._offset_s = offset_s
        self._elapsed_s = elapsed_s
        self._monotonic_s = monotonic_s

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._offset_s + self._elapsed_s()

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._monotonic_s()
