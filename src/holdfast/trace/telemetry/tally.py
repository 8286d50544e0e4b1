"""Count the samples of a metric in one pass, without keeping the samples.

The counts are the mergeable aggregates, and the numbers that the checks need. The counts of two
parts (of a file, or days, or shards) are combined by `merge`.
"""

import math
from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.telemetry.metrics import Metric
from holdfast.trace.telemetry.values import FieldValues, Values, rounded
from holdfast.trace.telemetry.wide_csv import Block

HOUR_US: Final = 3_600_000_000
Counts = npt.NDArray[np.int64]


class ValueCounts:
    """Count how often each value occurs; values are rounded to the metric's resolution."""

    def __init__(self, metric: Metric) -> None:
        self._decimals = metric.decimals
        self._values = np.empty(0)
        self._counts = np.empty(0, dtype=np.int64)
        self._by_id = np.zeros(0, dtype=np.int64)
        self._pending: list[tuple[Values, Counts]] = []
        self._pending_size = 0

    def add(self, block: Block) -> None:
        """Count the values of a block."""
        if block.ids is None:
            self._add_values(block.values)
            return
        counts = np.bincount(block.ids.ravel(), minlength=len(self._by_id))
        counts[: len(self._by_id)] += self._by_id
        self._by_id = counts

    def _add_values(self, values: Values) -> None:
        distinct, counts = np.unique(
            rounded(values[~np.isnan(values)], self._decimals), return_counts=True
        )
        self._append(distinct, counts)

    def _append(self, values: Values, counts: Counts) -> None:
        self._pending.append((values, counts))
        self._pending_size += len(values)
        if self._pending_size > 1 << 20:
            self._compact()

    def _compact(self) -> None:
        values = np.concatenate([self._values, *(values for values, _ in self._pending)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._pending)])
        self._values, where = np.unique(values, return_inverse=True)
        self._counts = np.zeros(len(self._values), dtype=np.int64)
        np.add.at(self._counts, where, counts)
        self._pending, self._pending_size = [], 0

    def settle(self, fields: FieldValues) -> Counter[str]:
        """Convert the counts by id to counts by value, when all blocks have been added.

        Returns:
            The number of fields without a value, by reason.
        """
        by_id = fields.by_id[: len(self._by_id)]
        real = ~np.isnan(by_id) & (self._by_id > 0)
        self._append(rounded(by_id[real], self._decimals), self._by_id[real])
        self._compact()
        dropped = Counter(fields.dropped)
        for reason, count in zip(fields.reasons, self._by_id.tolist(), strict=False):
            if reason and count:
                dropped[reason] += count
        self._by_id = np.zeros(0, dtype=np.int64)
        return dropped

    def merge(self, other: "ValueCounts") -> None:
        """Add the counts of another part, on which `settle` was called."""
        self._append(other._values, other._counts)

    def result(self) -> tuple[Values, Counts]:
        """Return the distinct values in ascending order, and the count of each."""
        self._compact()
        return self._values, self._counts


class DeviceTotals:
    """Sum up each device and each hour: sums, smallest and largest values, and gaps."""

    def __init__(self, devices: int, interval_s: float) -> None:
        self.n = np.zeros(devices, dtype=np.int64)
        self.n_zero = np.zeros(devices, dtype=np.int64)
        self.sum = np.zeros(devices)
        self.min = np.full(devices, math.inf)
        self.max = np.full(devices, -math.inf)
        self.hours: dict[int, tuple[int, float, int]] = {}
        """For each hour since the epoch: number of samples, their sum, and number of zeros."""
        self.gaps = np.zeros(devices, dtype=np.int64)
        self.gap_s = np.zeros(devices)
        """Sum of a device's gaps longer than two intervals, each less one interval."""
        self._interval_s = interval_s
        self._first_s = np.full(devices, math.nan)
        self._last_s = np.full(devices, -math.inf)

    def add(self, at_us: Counts, values: Values) -> None:
        """Add samples of shape (rows, devices), in order of time."""
        there = values == values  # noqa: PLR0124 - NaN differs from itself
        zero = values == 0
        known = np.where(there, values, 0.0)
        self.n += there.sum(axis=0, dtype=np.int32)
        self.n_zero += zero.sum(axis=0, dtype=np.int32)
        self.sum += known.sum(axis=0)
        np.fmin(self.min, np.fmin.reduce(values, axis=0), out=self.min)
        np.fmax(self.max, np.fmax.reduce(values, axis=0), out=self.max)
        self._add_hours(at_us, there.sum(axis=1), known.sum(axis=1), zero.sum(axis=1))
        self._add_gaps(at_us / 1e6, there)

    def _add_hours(self, at_us: Counts, n: Counts, total: Values, n_zero: Counts) -> None:
        hours, where = np.unique(at_us // HOUR_US, return_inverse=True)
        for index, hour in enumerate(hours.tolist()):
            rows = where == index
            self._add_hour(
                hour, int(n[rows].sum()), float(total[rows].sum()), int(n_zero[rows].sum())
            )

    def _add_hour(self, hour: int, n: int, total: float, n_zero: int) -> None:
        old = self.hours.get(hour, (0, 0.0, 0))
        self.hours[hour] = (old[0] + n, old[1] + total, old[2] + n_zero)

    def _add_gaps(self, at_s: Values, there: npt.NDArray[np.bool_]) -> None:
        if math.isnan(self._interval_s):
            return
        seen_s = np.maximum.accumulate(
            np.vstack([self._last_s, np.where(there, at_s[:, None], -math.inf)]), axis=0
        )
        silent_s = at_s[:, None] - seen_s[:-1]
        gap = there & (silent_s > 2 * self._interval_s) & (silent_s < math.inf)
        if gap.any():
            self.gaps += gap.sum(axis=0)
            self.gap_s += np.where(gap, silent_s - self._interval_s, 0.0).sum(axis=0)
        fresh = np.isnan(self._first_s) & there.any(axis=0)
        self._first_s[fresh] = at_s[there.argmax(axis=0)[fresh]]
        self._last_s = seen_s[-1]

    def merge(self, later: "DeviceTotals") -> None:
        """Add the totals of a part whose samples are all later."""
        self.n += later.n
        self.n_zero += later.n_zero
        self.sum += later.sum
        np.fmin(self.min, later.min, out=self.min)
        np.fmax(self.max, later.max, out=self.max)
        for hour, row in later.hours.items():
            self._add_hour(hour, *row)
        between_s = later._first_s - self._last_s
        gap = (between_s > 2 * self._interval_s) & (between_s < math.inf)
        self.gaps += later.gaps + gap
        self.gap_s += later.gap_s + np.where(gap, between_s - self._interval_s, 0.0)
        self._first_s = np.where(np.isnan(self._first_s), later._first_s, self._first_s)
        self._last_s = np.maximum(self._last_s, later._last_s)
