"""Read a wide file once, in several threads, and count its samples.

Other consumers may receive the same blocks.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.trace.errors import BadTrace
from holdfast.trace.telemetry.metrics import RATIO, Metric
from holdfast.trace.telemetry.tally import DeviceTotals, ValueCounts
from holdfast.trace.telemetry.values import FieldValues, Values
from holdfast.trace.telemetry.wide_csv import Block, WideFile, blocks, open_wide, parts

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Onset:
    """The moment at which a device's Xid code changed from none to an error."""

    at_us: int
    device: int
    """Index of the device in its file."""
    code: int


@dataclass
class Onsets:
    """The onsets in a range of samples.

    The codes at both ends of the range are kept, so that adjacent ranges can be joined.
    """

    devices: int
    found: list[Onset] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = np.full(self.devices, np.nan)
        self._first_at = np.zeros(self.devices, dtype=np.int64)
        self._last = np.full(self.devices, np.nan)

    def add(self, at_us: Times, codes: Values) -> None:
        """Add samples of shape (rows, devices), in order of time; NaN means not measured."""
        gauges = np.vstack([self._last, codes])
        missing = np.isnan(gauges)
        if missing[1:].any():
            # A code that was not measured keeps the gauge's last value.
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
        """Append a range whose samples are all later."""
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
        """Return the number of devices that already had an error at their first sample."""
        return int((self._first > 0).sum())


PART_BYTES: Final = 1 << 24
"""Bytes of a file for which starting another thread is worthwhile."""


See = Callable[[Block], None]
"""A function that receives the blocks of one thread, in the file's order."""


class Watcher(Protocol):
    """Another consumer of the blocks of a file."""

    def begin(self, wide: WideFile) -> None:
        """Start reading a file. A second call discards the blocks of the first reading."""

    def thread(self) -> See:
        """Return the function that receives one more thread's blocks.

        This method is called before reading, once per thread, in the order of the threads' parts.
        """


@dataclass
class Scan:
    """The result of reading a wide file, or a part of it, once."""

    wide: WideFile
    metric: Metric
    factor: float
    counts: ValueCounts
    totals: DeviceTotals | None
    """Totals of each device; None if only values were requested."""
    onsets: Onsets | None
    """Onsets of Xid errors; None for other metrics than XID_ERRORS."""
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of fields without a value, by reason."""
    duplicates: list[int] = field(default_factory=list)
    """Times of the rows that were dropped because of a repeated time, in microseconds."""
    backward_steps: int = 0
    offsets: set[str] = field(default_factory=set)
    first_us: int | None = None
    last_us: int | None = None

    def merge(self, later: "Scan") -> None:
        """Append the result of the part that follows."""
        self.counts.merge(later.counts)
        if self.totals and later.totals:
            self.totals.merge(later.totals)
        if self.onsets and later.onsets:
            self.onsets.merge(later.onsets)
        self.rows += later.rows
        self.dropped += later.dropped
        self.duplicates += later.duplicates
        self.backward_steps += later.backward_steps
        self.offsets |= later.offsets
        self.last_us = later.last_us

    @property
    def xid_onsets(self) -> list[Onset]:
        """Return the onsets of Xid errors, sorted by time."""
        return (
            sorted(self.onsets.found, key=lambda onset: (onset.at_us, onset.device))
            if self.onsets
            else []
        )


def scan_wide(
    path: Path,
    metric: Metric,
    *,
    factor: float | None = 1.0,
    values_only: bool = False,
    threads: int | None = None,
    watcher: Watcher | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scan:
    """Read a wide file once.

    Of several rows with the same time, only the first is kept, as in AcmeTrace's own script.

    Args:
        path: the file.
        metric: the metric of the values.
        factor: the factor from the file's unit to the metric's unit. None infers the factor with
            `found_factor`, which may read the file once more.
        values_only: True to only count values.
        threads: number of threads, by default one per core; each uses a few MB.
        watcher: another consumer that receives every block.
        progress: called with the number of bytes just read, from any of the threads.

    Raises:
        BadTrace: the file cannot be read as wide CSV; the message has the place.
    """
    wide = open_wide(path)
    if factor is None:
        factor = found_factor(wide, metric)
    number = threads or min(len(os.sched_getaffinity(0)), 1 + wide.size_bytes // PART_BYTES)
    ranges = parts(wide, number) or [(wide.body, wide.size_bytes)]
    if watcher:
        watcher.begin(wide)
    sees = [watcher.thread() if watcher else None for _ in ranges]
    readers = [_Reader(wide, metric, factor, values_only, see, progress) for see in sees]
    _run([reader.read for reader in readers], ranges)
    found = [reader.scan for reader in readers]
    times = [
        np.concatenate(reader.times) if reader.times else np.empty(0, dtype=np.int64)
        for reader in readers
    ]
    if len(ranges) > 1 and not _ascend(times):
        return scan_wide(
            path, metric, factor=factor, values_only=values_only, threads=1, watcher=watcher
        )
    whole, *rest = found
    for part in rest:
        whole.merge(part)
    if len(whole.duplicates) >= whole.rows > 0:
        raise BadTrace(
            path, f"{len(whole.duplicates)} rows repeat a time and {whole.rows} do not, so this is no wide table.",
            next_step="Give a long table the columns time, device and value, or export a column for each device.",
        )  # fmt: skip
    return whole


def found_factor(wide: WideFile, metric: Metric) -> float:
    """Infer the factor from the file's unit to the metric's unit.

    If a value is too large for the coarser unit, the file uses the metric's unit and the factor is
    1. If no value is too large, the file uses the coarser unit, and the factor converts from it.
    The first block usually decides. A file in the coarser unit, or of an idle cluster, is read to
    its end.
    """
    if metric.may_be_ratio:
        return _ratio_factor(wide, metric)
    if metric.coarse is None:
        return 1.0
    most, factor = metric.coarse
    fields = FieldValues(metric, 1.0)
    for block in blocks(wide, fields, wide.body, wide.size_bytes):
        if (block.values > most).any():
            return 1.0
    return factor


def _ratio_factor(wide: WideFile, metric: Metric) -> float:
    """Return the factor from ratios to per cent if the file has ratios, else 1.

    Values are taken as ratios if they have fractions and none is above 1. The values of an idle
    cluster are only 0 and 1, so its factor is 1.
    """
    has_fractions = False
    for block in blocks(wide, FieldValues(metric, 1.0), wide.body, wide.size_bytes):
        if (block.values > 1).any():
            return 1.0
        known = block.values[~np.isnan(block.values)]
        has_fractions = has_fractions or bool((known != np.round(known)).any())
    return RATIO if has_fractions else 1.0


def _ascend(times: list[npt.NDArray[np.int64]]) -> bool:
    """Return True if each part's rows are all later than the rows of the part before it.

    Parts can then be joined without sorting.
    """
    ends = [(int(part.min()), int(part.max())) for part in times if len(part)]
    return all(before[1] < after[0] for before, after in pairwise(ends))


def _run(reads: list[Callable[[int, int], None]], ranges: list[tuple[int, int]]) -> None:
    """Run each reader on its range in a thread of its own.

    If several fail, raise the error that comes first in the file.
    """
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            reads[index](*ranges[index])
        except BaseException as error:
            errors[index] = error

    others = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(1, len(reads))
    ]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]


class _Reader:
    """Read one part of a file into a `Scan`."""

    def __init__(
        self,
        wide: WideFile,
        metric: Metric,
        factor: float,
        values_only: bool,
        see: See | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        devices = len(wide.devices)
        self.scan = Scan(
            wide,
            metric,
            factor,
            ValueCounts(metric),
            None if values_only else DeviceTotals(devices, wide.interval_s),
            Onsets(devices) if metric.name == "XID_ERRORS" and not values_only else None,
        )
        self.times: list[npt.NDArray[np.int64]] = []
        self._fields = FieldValues(metric, factor)
        self._see, self._progress = see, progress
        self._seen_us: set[int] = set()

    def read(self, low: int, high: int) -> None:
        scan = self.scan
        for block in blocks(scan.wide, self._fields, low, high):
            if self._progress:
                self._progress(block.size_bytes)
            for fresh in self._fresh(block):
                scan.rows += len(fresh.at_us)
                scan.counts.add(fresh)
                if scan.totals:
                    scan.totals.add(fresh.at_us, fresh.values)
                if scan.onsets:
                    scan.onsets.add(fresh.at_us, fresh.values)
                if self._see:
                    self._see(fresh)
        scan.dropped += scan.counts.settle(self._fields)

    def _fresh(self, block: Block) -> Iterator[Block]:
        """Yield the block without rows whose time has occurred before, and record its times."""
        scan, at_us = self.scan, block.at_us
        if not len(at_us):
            return
        scan.offsets |= block.offsets
        before = at_us[:1] if scan.last_us is None else np.array([scan.last_us])
        steps = np.diff(at_us, prepend=before)
        scan.first_us = int(at_us[0]) if scan.first_us is None else scan.first_us
        scan.last_us = int(at_us[-1])
        scan.backward_steps += int((steps < 0).sum())
        self.times.append(at_us)
        new = []
        for row, time_us in enumerate(at_us.tolist()):
            if time_us in self._seen_us:
                scan.duplicates.append(time_us)
            else:
                self._seen_us.add(time_us)
                new.append(row)
        if len(new) == len(at_us):
            yield block
        elif new:
            yield block.rows(new)
