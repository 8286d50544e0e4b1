"""Define the clock that code takes as an argument if it waits or records times.

Tests pass a `holdfast.testing.FakeClock`.
"""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Return wall-clock time for records, and monotonic time for time limits."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch, UTC, for records that people read."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never decrease, for time limits.

        On Linux, all processes of a host read the same value.
        """
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
    """Return seconds that never decrease; on Linux, suspended time counts as well."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def wall_offset_s() -> float:
    """Return the current wall-clock time minus `elapsed_s`, in seconds."""
    return time.time() - elapsed_s()


class SteadyClock:
    """A clock whose wall-clock time never jumps; the machine's wall clock is read only once.

    If the machine's wall clock is set during a run, the differences between the times in the run's
    records stay correct.
    """

    def __init__(
        self,
        offset_s: float,
        *,
        elapsed_s: Callable[[], float] = elapsed_s,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the offset between wall-clock time and `elapsed_s`.

        Args:
            offset_s: the result of `wall_offset_s`, in seconds; processes of a host that must agree
                on the time use the same value.
            elapsed_s: returns seconds that never decrease.
            monotonic_s: returns the seconds for time limits.
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
