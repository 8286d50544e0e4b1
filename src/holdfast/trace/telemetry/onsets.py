"""Onsets of Xid errors from a gauge that holds the last code.

An onset is a transition into a code from no fault (0, or an empty cell of a wide table). A code that stays, or gives
way to another without a clear between, is the same fault; one that is there at a device's first sample began before
the trace (left-censored). Counting non-zero samples instead would count a fault every 15 seconds.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holdfast.trace.telemetry.values import Values

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Onset:
    """A device fell into a fault."""

    at_us: int
    device: int
    """Index of the device in its file."""
    code: int


@dataclass
class Onsets:
    """Onsets in a stretch of samples, and the gauges at its ends, so that stretches can be joined."""

    devices: int
    found: list[Onset] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = np.full(self.devices, np.nan)
        self._first_at = np.zeros(self.devices, dtype=np.int64)
        self._last = np.full(self.devices, np.nan)

    def add(self, at_us: Times, codes: Values) -> None:
        """Look for onsets in samples of shape (rows, devices) at ascending times; NaN was not measured."""
        gauges = np.vstack([self._last, codes])
        missing = np.isnan(gauges)
        if missing[1:].any():
            # Where a code was not measured, the gauge stands where it stood.
            last_seen = np.maximum.accumulate(
                np.where(missing, 0, np.arange(len(gauges))[:, None]), axis=0
            )
            gauges = np.take_along_axis(gauges, last_seen, axis=0)
        for row, device in zip(*np.nonzero((gauges[1:] > 0) & (gauges[:-1] == 0)), strict=True):
            self.found.append(Onset(int(at_us[row]), int(device), int(gauges[row + 1, device])))
        fresh = np.isnan(self._first) & ~np.isnan(codes).all(axis=0)
        if fresh.any():
            rows = (~np.isnan(codes[:, fresh])).argmax(axis=0)
            self._first[fresh], self._first_at[fresh] = (
                codes[rows, np.flatnonzero(fresh)],
                at_us[rows],
            )
        self._last = gauges[-1]

    def merge(self, later: "Onsets") -> None:
        """Join a stretch whose samples are all later."""
        for device in np.flatnonzero((self._last == 0) & (later._first > 0)).tolist():
            self.found.append(
                Onset(int(later._first_at[device]), device, int(later._first[device]))
            )
        self.found += later.found
        fresh = np.isnan(self._first)
        self._first[fresh], self._first_at[fresh] = later._first[fresh], later._first_at[fresh]
        seen = ~np.isnan(later._last)
        self._last[seen] = later._last[seen]

    @property
    def left_censored(self) -> int:
        """How many devices were in a fault at their first sample."""
        return int((self._first > 0).sum())
