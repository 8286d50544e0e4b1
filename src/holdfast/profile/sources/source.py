"""Define the protocol of all sources, and filter values that no device can have."""

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
"""The largest plausible value for each unit; larger values mark a missing value.

DCGM marks a missing value by 2^31 - 16, 2^47 or 2^63 - 16 and above. AMD's library uses 2^16 - 1
and 2^32 - 1, and NVML uses 2^32 - 1 or 2^64 - 1.
"""


class CannotRead(Exception):
    """A source returned no values; the message states the reason."""


class SourceEnded(CannotRead):
    """A source has stopped for good; another source may still work."""


class Source(Protocol):
    """Measure some metrics of one node."""

    name: str

    def read(self, now_ns: int) -> dict[SeriesId, float]:
        """Return the current values. A rate is the average since the previous call.

        Args:
            now_ns: the current monotonic time in nanoseconds.

        Raises:
            CannotRead: the source returned no values this time.
            SourceEnded: the source has stopped for good.
        """
        ...

    def close(self) -> None:
        """Release the resources of the source, such as processes and library handles."""
        ...


def plausible(values: Iterable[tuple[SeriesId, float | None]]) -> dict[SeriesId, float]:
    """Return the values that a device can have, without sentinels, NaN and negative values."""
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
    """Convert counters that only increase into rates per second."""

    def __init__(self) -> None:
        self._before: dict[SeriesId, tuple[int, float]] = {}

    def of(self, key: SeriesId, now_ns: int, total: float) -> float | None:
        """Return the increase per second since the previous call for this series.

        Return None at the first call, and if the counter has been reset.
        """
        before = self._before.get(key)
        self._before[key] = now_ns, total
        if before is None or now_ns <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / ((now_ns - before[0]) / 1e9)
