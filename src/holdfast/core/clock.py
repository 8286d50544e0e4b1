"""Inject time: code that waits or records times takes a `Clock`.

Tests use `holdfast.testing.FakeClock`.
"""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Two clocks in one: wall time for records, monotonic time for limits."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch, UTC, for records that people read."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never decrease, for limits.

        On Linux, all processes of a host see the same seconds.
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
    """Return the present wall-clock time minus `elapsed_s`, in seconds."""
    return time.time() - elapsed_s()


class SteadyClock:
    """A clock whose wall time never jumps, because the machine's wall clock is read once.

    The distances between the records of a run stay true if the wall clock is set during the run.
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
            elapsed_s: returns seconds that never decrease.
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
