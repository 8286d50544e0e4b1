"""The loss of a run as a bounded series, read incrementally from the journal of steps.

Of each bucket of steps the series keeps the lowest, the highest and the last loss, so that a spike
of one step stays visible at any width. If the buckets become too many, two neighbours become one. A
page reads only the bytes that were appended since the page before, at most `READ_BYTES`.
"""

import copy
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepRecord, decode_step

BUCKETS_LIMIT = 1000
READ_BYTES = 4 << 20
STEPS_KEPT = 5000
SERIES_KEPT = 64
LINE_LIMIT = 1 << 18
"""The most bytes of one step's line. The supervisor's frames are smaller."""


class Series:
    """The loss curve of one journal, and its newest steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._read_bytes = 0
        self._inode = inode
        self.width = 1
        """The steps of a bucket."""
        self.buckets: OrderedDict[tuple[int, int], list[float]] = OrderedDict()
        """By attempt and bucket: first step, lowest, highest and last loss."""
        self.steps: list[StepRecord] = []
        """The newest steps, at most `STEPS_KEPT` and as many again before a cut."""
        self.left_out = 0
        """The steps that are not in `steps` any more."""
        self.unread_bytes = 0
        """The bytes of the journal that the next page reads."""
        self.damaged_lines = 0
        """The lines that are no step records, and were passed over."""
        self.broken: list[tuple[int, int]] = []
        """Attempt and step of the newest losses that were no finite number."""

    def update(self) -> None:
        """Read the appended lines, up to the limit.

        Raises:
            HoldfastError: the journal cannot be read.
        """
        try:
            with self._path.open("rb") as journal:
                self._read(journal)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise HoldfastError(
                f"The journal of steps cannot be read after byte {self._read_bytes}: {error}."
            ) from error

    def _read(self, journal: Any) -> None:
        state = os.fstat(journal.fileno())
        if state.st_ino != self._inode or state.st_size < self._read_bytes:
            self._begin(state.st_ino)  # the file was replaced or truncated
        journal.seek(self._read_bytes)
        data = journal.read(READ_BYTES)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) > LINE_LIMIT:
            raise ValueError(f"a line is longer than {LINE_LIMIT} bytes")
        for line in data[:whole].split(b"\n")[:-1]:
            self._read_bytes += len(line) + 1
            try:
                record = decode_step(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.damaged_lines += 1  # a failing disk must not hide an incident
                continue
            self._add(record)
        self.unread_bytes = max(0, state.st_size - self._read_bytes - (len(data) - whole))
        if len(self.steps) > 2 * STEPS_KEPT:
            self.left_out += len(self.steps) - STEPS_KEPT
            del self.steps[:-STEPS_KEPT]

    def _add(self, record: StepRecord) -> None:
        self.steps.append(record)
        if record.loss is None:
            return
        if not math.isfinite(record.loss):
            self.broken = [*self.broken[-99:], (record.attempt, record.step)]
            return
        _put(self.buckets, (record.attempt, record.step // self.width),
             [record.step, record.loss, record.loss, record.loss])  # fmt: skip
        while len(self.buckets) > BUCKETS_LIMIT:
            self.width *= 2
            merged: OrderedDict[tuple[int, int], list[float]] = OrderedDict()
            for (attempt, _), values in self.buckets.items():
                _put(merged, (attempt, int(values[0]) // self.width), values)
            if len(merged) == len(self.buckets):  # one bucket per attempt: drop the oldest
                merged.popitem(last=False)
            self.buckets = merged

    def copied(self) -> "Series":
        """Return a copy that later updates do not change."""
        found = copy.copy(self)
        found.buckets = OrderedDict((key, list(values)) for key, values in self.buckets.items())
        found.steps = list(self.steps)
        return found

    def lines(self) -> list[dict[str, Any]]:
        """Return each attempt's curve: `attempt`; equally long `steps`, `low`, `high`, `last`."""
        found: dict[int, dict[str, Any]] = {}
        for (attempt, _), (step, low, high, last) in self.buckets.items():
            line = found.setdefault(
                attempt, {"attempt": attempt, "steps": [], "low": [], "high": [], "last": []}
            )
            for name, value in (("steps", int(step)), ("low", low), ("high", high), ("last", last)):
                line[name].append(value)
        return list(found.values())


def _put(
    buckets: "OrderedDict[tuple[int, int], list[float]]",
    key: tuple[int, int],
    values: Sequence[float],
) -> None:
    known = buckets.get(key)
    if known is None:
        buckets[key] = list(values)
        return
    known[1:] = [min(known[1], values[1]), max(known[2], values[2]), values[3]]


class Journals:
    """The series of the runs that were looked at last. Any thread may use it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._series: OrderedDict[str, Series] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run_id: str) -> Series:
        """Return a copy of the series of a run, read up to the present or up to the limit.

        Raises:
            HoldfastError: the journal cannot be read.
        """
        with self._lock:
            series = self._series.pop(run_id, None) or Series(RunPaths(self._home, run_id).steps)
            self._series[run_id] = series
            while len(self._series) > SERIES_KEPT:
                self._series.popitem(last=False)
            series.update()
            return series.copied()


def newest_step(home: Path, run_id: str) -> StepRecord | None:
    """Return the last whole record of a run's journal; None if this host has none."""
    try:
        with RunPaths(home, run_id).steps.open("rb") as journal:
            journal.seek(0, 2)
            journal.seek(max(0, journal.tell() - 8192))
            lines = journal.read(8192).rpartition(b"\n")[0].splitlines()
        return decode_step(lines[-1]) if lines else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
