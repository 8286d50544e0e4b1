"""The seam of all sources, and the check that keeps sentinels out of a recording."""

import math
from collections.abc import Iterable
from typing import Final, Protocol

from holdfast.profile.metrics import METRICS
from holdfast.profile.recording import SeriesId

MOST: Final = {
    "%": 100.5,
    "W": 20_000.0,
    "C": 250.0,
    "MHz": 20_000.0,
    "B/s": 1e14,
    "B": 2.0**46,
    "J": 2.0**43,
}
"""The largest value of each unit that a device can have.

DCGM marks a missing value by 2^31 - 16, 2^47 or 2^63 - 16 and above. AMD's library does so by 2^16
- 1 and 2^32 - 1, and NVML by 2^32 - 1 or 2^64 - 1.
"""


class CannotRead(Exception):
    """A source gives no values; the message states the reason."""


class SourceEnded(CannotRead):
    """A source gives no values any more; another source may."""


class Source(Protocol):
    """Measures some metrics of one node."""

    name: str

    def read(self, now_ns: int) -> dict[SeriesId, float]:
        """Return the values of this moment; rates are of the time since the read before.

        Args:
            now_ns: the monotonic clock, in nanoseconds.

        Raises:
            CannotRead: the source gives no values.
            SourceEnded: the source gives no values any more.
        """
        ...

    def close(self) -> None:
        """Release what the source holds."""
        ...


def plausible(values: Iterable[tuple[SeriesId, float | None]]) -> dict[SeriesId, float]:
    """Return the values that a device can have: no sentinels, no NaN, nothing negative."""
    found = {}
    for key, value in values:
        if value is None or not math.isfinite(value) or value < 0:
            continue
        unit = METRICS[key.metric].unit
        if value <= MOST.get(unit, math.inf):
            found[key] = (
                min(value, 100.0) if key.metric.startswith("gpu") and unit == "%" else value
            )
    return found


class Rates:
    """Turns totals that only grow into rates a second."""

    def __init__(self) -> None:
        self._before: dict[SeriesId, tuple[int, float]] = {}

    def of(self, key: SeriesId, now_ns: int, total: float) -> float | None:
        """Return the growth per second since the last call; None at first and after a reset."""
        before = self._before.get(key)
        self._before[key] = now_ns, total
        if before is None or now_ns <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / ((now_ns - before[0]) / 1e9)
