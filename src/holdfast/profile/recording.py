"""Define a recording: counters of the nodes and phases of the ranks of one run, in one folder.

    RUN/profile/samples-NODE.jsonl     counters, written by the node's sampler
    RUN/profile/spans-rankR.jsonl      phases and memory, written by the rank R

Each file has one writer at a time and holds one JSON object per line. A writer only appends whole
lines, so a file can be read while it is written. A writer that is killed loses at most the lines
that it had not yet written. Readers skip an incomplete last line, and the next writer removes it.

A file that has reached `writing.PART_BYTES` is renamed to `FILE.N`, where N increases. Of these
parts, only the newest `writing.KEPT_PARTS` are kept. Each part can be read without the other parts.
The kinds of lines are:

| `kind` | fields |
|---|---|
| `begin` | `version`, `node`, `rank` (null in samples), `attempt`, `pid`: a writer opened the file or a new part |
| `clock` | `monotonic_ns`, `unix_ns`: the two clocks at one moment; repeated each minute |
| `series` | `id`, `metric`, `unit`, `source`, `device`, `rank`, `interval_s`: declares `id` until the next `begin` |
| `sample` | `t_monotonic_ns`, `values`: a number for each id |
| `source` | `name`, `text`: a source that cannot be read, and why; an empty text: the source can be read |
| `spans` | `step`, `base_ns`, `spans`: `[phase, start, end]` for each span, in ns after the monotonic `base_ns` |
| `memory` | `t_monotonic_ns`, `step`, `allocated_bytes`, `reserved_bytes`, `peak_bytes` |
| `dropped` | `spans`: the number of spans that were dropped because the disk was too slow |

Times in the files are monotonic, because the wall clock of a node can be changed. `Recording.read`
converts each time to Unix nanoseconds with the last `clock` line before it. The times of all nodes,
ranks and incidents are then comparable.
"""

import contextlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote

from holdfast.core.errors import BadUse, NotFound
from holdfast.profile.columns import Columns, Whole, Words, column
from holdfast.profile.incidents import IncidentMark
from holdfast.profile.metrics import METRICS, PHASES
from holdfast.profile.parts import MAX_BYTES, newest

VERSION: Final = 1
FOLDER: Final = "profile"
"""The folder of a recording, inside the folder of a run or of an evaluation."""
STEADY_NS: Final = 1_000_000
"""Smaller changes of the offset between wall clock and monotonic clock are measurement errors."""
_FILE: Final = re.compile(
    r"(samples-(?P<node>.+)|spans-rank(?P<rank>\d+))\.jsonl(\.(?P<part>\d+))?"
)


@dataclass(frozen=True, slots=True)
class SeriesId:
    """Identify a series by its metric, device and source.

    Attributes:
        metric: a name of `metrics.METRICS`.
        source: the name of the source that measures the metric.
        device: the GPU's index on its node; None for a metric of the host.
        rank: the rank whose process is measured; None if the metric does not belong to one rank.
        interval_s: seconds between two samples.
    """

    metric: str
    source: str
    device: int | None = None
    rank: int | None = None
    interval_s: float = 1.0

    @property
    def unit(self) -> str:
        """Return the unit of the series' values."""
        return METRICS[self.metric].unit


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one metric of one device, rank or node, in chronological order.

    Attributes:
        times_ns: the time of each value, in Unix nanoseconds.
        values: the values in `unit`, one for each time.
    """

    metric: str
    unit: str
    source: str
    node: str
    device: int | None
    rank: int | None
    interval_s: float
    times_ns: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one rank.

    Attributes:
        phase: a name of `metrics.PHASES`.
        start_ns: start in nanoseconds. The recorder writes monotonic time; a reader of the
            recording converts it to Unix time.
        end_ns: end, on the same clock as `start_ns`.
        step: the step during which the phase ran; None outside of steps.
    """

    phase: str
    start_ns: int
    end_ns: int
    step: int | None
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The device memory that one rank's PyTorch uses at one moment.

    Attributes:
        at_ns: time in nanoseconds. The recorder writes monotonic time; a reader of the
            recording converts it to Unix time.
        allocated_bytes: bytes of live tensors.
        reserved_bytes: bytes that PyTorch's allocator has reserved on the device.
        peak_bytes: the most allocated bytes so far, as PyTorch's allocator counts them.
    """

    at_ns: int
    step: int | None
    rank: int
    node: str
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """The monotonic clock and the Unix clock of one node at the same moment, in nanoseconds."""

    node: str
    monotonic_ns: int
    unix_ns: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All data that were recorded about one run.

    Attributes:
        series: the counters, sorted by metric, node, device and rank.
        spans: the phases, sorted by rank and start; a span inside another span comes after it.
        memory: the memory use of the ranks, sorted by rank and time.
        clocks: the clock readings of all files, in the order of the files.
        incidents: the incidents of the run, sorted by start.
        unavailable: for each node, the sources that cannot be read, and why.
        dropped_spans: the number of spans that were dropped because a disk was too slow.
        left_out_bytes: the size of older parts that were not read.
    """

    series: tuple[Series, ...] = ()
    spans: Sequence[Span] = ()
    memory: Sequence[MemoryUse] = ()
    clocks: tuple[ClockReading, ...] = ()
    incidents: tuple[IncidentMark, ...] = ()
    unavailable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dropped_spans: int = 0
    left_out_bytes: int = 0

    @classmethod
    def read(
        cls,
        folder: Path,
        incidents: Iterable[IncidentMark] = (),
        *,
        most_bytes: int = MAX_BYTES,
        has_spans: bool = True,
    ) -> Self:
        """Read a recording from its folder, even while the files are still being written.

        Args:
            folder: the folder of the recording, `RUN/profile`.
            incidents: the incidents of the run, see `incidents.incidents_of`.
            most_bytes: the most bytes to read; if the files are larger, the oldest parts are
                skipped.
            has_spans: False to read the nodes' counters alone.

        Raises:
            NotFound: the folder holds no recording.
            BadUse: a newer version of Holdfast wrote the recording.
        """
        files = _files(folder)
        if not has_spans:
            files = [file for file in files if file.name.startswith("samples-")]
        if not files:
            raise NotFound(
                f"{folder} holds no profile. `holdfast run` records one by default, and `holdfast profile -- COMMAND` "
                "records one of any command."
            )
        chosen = newest(files, most_bytes)
        reader = _Reader(chosen.from_ns)
        for file in chosen.paths:
            reader.read(file)
        return cls(
            series=tuple(
                Series(
                    metric=key.metric,
                    unit=key.unit,
                    source=key.source,
                    node=node,
                    device=key.device,
                    rank=key.rank,
                    interval_s=key.interval_s,
                    times_ns=points.times_ns(reader.moments[node]),
                    values=points.values,
                )
                for (node, key), points in sorted(reader.points.items(), key=_series_order)
            ),
            spans=reader.spans.rows(),
            memory=reader.memory.rows(),
            clocks=tuple(reader.clocks),
            incidents=tuple(sorted(incidents, key=lambda one: one.start_ns)),
            unavailable={node: dict(sources) for node, sources in reader.unavailable.items()},
            dropped_spans=reader.dropped_spans,
            left_out_bytes=chosen.left_out_bytes,
        )

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that recorded phases or memory, in ascending order."""
        return sorted({*column(self.spans, "rank"), *column(self.memory, "rank")})

    def spans_by_rank(self) -> Iterator[tuple[int, Sequence[Span]]]:
        """Yield each rank that recorded phases, with its spans, in ascending order."""
        ranks = column(self.spans, "rank")
        start = 0
        while start < len(ranks):
            end = bisect_right(ranks, ranks[start], start)
            yield ranks[start], self.spans[start:end]
            start = end

    def spans_of(self, rank: int) -> Sequence[Span]:
        """Return the phases of one rank."""
        ranks = column(self.spans, "rank")
        return self.spans[bisect_left(ranks, rank) : bisect_right(ranks, rank)]

    def memory_of(self, rank: int) -> Sequence[MemoryUse]:
        """Return the memory use of one rank, in chronological order."""
        ranks = column(self.memory, "rank")
        return self.memory[bisect_left(ranks, rank) : bisect_right(ranks, rank)]

    def of(self, metric: str) -> list[Series]:
        """Return the series of one metric, for all nodes, devices and ranks."""
        return [one for one in self.series if one.metric == metric]


class _Points:
    """Collect the values of one series while a recording is read.

    All series of a node share one list of sample times. Each value is stored with the index of its
    time in that list.
    """

    def __init__(self) -> None:
        self.values = array("d")
        self._stretches: list[tuple[int, int]] = []
        """The start of each gapless run of samples: the index of its time and of its value."""

    def add(self, place: int, value: float) -> None:
        count = len(self.values)
        if not self._stretches or place - self._stretches[-1][0] != count - self._stretches[-1][1]:
            self._stretches.append((place, count))
        self.values.append(value)

    def times_ns(self, moments: "array[int]") -> Sequence[int]:
        """Return the sample time of each value; this makes a copy only if the series has gaps."""
        ends = [*(count for _, count in self._stretches[1:]), len(self.values)]
        parts = [
            memoryview(moments)[place : place + end - count]
            for (place, count), end in zip(self._stretches, ends, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        times = array("q")
        for part in parts:
            times.extend(part)
        return times


class _Spans:
    """Collect phases in columns, in the order of `Recording.spans`."""

    def __init__(self) -> None:
        self._phases, self._steps, self._nodes = Words(), Whole(), Words()
        self._starts_ns, self._ends_ns, self._ranks = array("q"), array("q"), array("q")

    def add(
        self, phase: str, start_ns: int, end_ns: int, step: int | None, rank: int, node: str
    ) -> None:
        array("q", (start_ns, end_ns, rank, step or 0))  # raises before any column grows
        # Nearly all rows come in order, so the search usually ends at once.
        at = _place(len(self._ranks), self._key, (rank, start_ns, -end_ns))
        self._starts_ns.insert(at, start_ns)
        self._ends_ns.insert(at, end_ns)
        self._ranks.insert(at, rank)
        self._phases.insert(at, phase)
        self._steps.insert(at, step)
        self._nodes.insert(at, node)

    def _key(self, at: int) -> tuple[int, ...]:
        return self._ranks[at], self._starts_ns[at], -self._ends_ns[at]

    def rows(self) -> Columns[Span]:
        return Columns(
            Span,
            {
                "phase": self._phases,
                "start_ns": self._starts_ns,
                "end_ns": self._ends_ns,
                "step": self._steps,
                "rank": self._ranks,
                "node": self._nodes,
            },
        )


class _Memory:
    """Collect records of memory use in columns, in the order of `Recording.memory`."""

    def __init__(self) -> None:
        self._steps, self._nodes = Whole(), Words()
        self._at_ns, self._ranks = array("q"), array("q")
        self._sizes = array("q"), array("q"), array("q")

    def add(self, at_ns: int, step: int | None, rank: int, node: str, *sizes: int) -> None:
        array("q", (at_ns, rank, step or 0, *sizes))  # raises before any column grows
        at = _place(len(self._ranks), self._key, (rank, at_ns))
        self._at_ns.insert(at, at_ns)
        self._ranks.insert(at, rank)
        self._steps.insert(at, step)
        self._nodes.insert(at, node)
        for own, size in zip(self._sizes, sizes, strict=True):
            own.insert(at, size)

    def _key(self, at: int) -> tuple[int, ...]:
        return self._ranks[at], self._at_ns[at]

    def rows(self) -> Columns[MemoryUse]:
        allocated, reserved, peak = self._sizes
        return Columns(
            MemoryUse,
            {
                "at_ns": self._at_ns,
                "step": self._steps,
                "rank": self._ranks,
                "node": self._nodes,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "peak_bytes": peak,
            },
        )


def _place(count: int, key_of: Callable[[int], tuple[int, ...]], key: tuple[int, ...]) -> int:
    """Return the index at which to insert a row: after all rows with a smaller or equal key."""
    if count == 0 or key_of(count - 1) <= key:
        return count
    return bisect_right(range(count), key, key=key_of)


class _Reader:
    """Collect the records of all files of a recording."""

    def __init__(self, from_ns: int) -> None:
        self._from_ns = from_ns
        self.moments: dict[str, array[int]] = {}
        """For each node, the sample times in Unix ns, which all series of the node share."""
        self.points: dict[tuple[str, SeriesId], _Points] = {}
        self.spans = _Spans()
        self.memory = _Memory()
        self.clocks: list[ClockReading] = []
        self.unavailable: dict[str, dict[str, str]] = {}
        self.dropped_spans = 0
        self._node, self._rank = "", 0
        self._ids: dict[str, SeriesId] = {}
        self._offsets_ns: dict[str, int] = {}
        """For each node, the offset in ns to add to monotonic times to get Unix times."""

    def read(self, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            for line in _lines(file):
                # A damaged line is left out; each line stands for itself.
                try:
                    self._take(file, line)
                except BadUse:
                    raise
                except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                    continue

    def _take(self, file: Path, line: dict[str, Any]) -> None:
        offset_ns = self._offsets_ns.get(self._node, 0)
        match line["kind"]:
            case "begin":
                if line["version"] > VERSION:
                    raise BadUse(
                        f"{file} is of version {line['version']}, which is newer than this Holdfast reads "
                        f"({VERSION}). Install the Holdfast that wrote it."
                    )
                self._node, self._rank = str(line["node"]), int(line["rank"] or 0)
                self._ids.clear()
            case "clock":
                one = ClockReading(
                    node=self._node,
                    monotonic_ns=int(line["monotonic_ns"]),
                    unix_ns=int(line["unix_ns"]),
                )
                self.clocks.append(one)
                new_ns = one.unix_ns - one.monotonic_ns
                # Ignore a change within the reading error: adjacent spans would overlap by this
                # error.
                if abs(new_ns - offset_ns) >= STEADY_NS:
                    self._offsets_ns[self._node] = new_ns
            case "series" if line["metric"] in METRICS:
                self._ids[str(line["id"])] = SeriesId(
                    metric=str(line["metric"]),
                    source=str(line["source"]),
                    device=None if line["device"] is None else int(line["device"]),
                    rank=None if line["rank"] is None else int(line["rank"]),
                    interval_s=float(line["interval_s"]),
                )
            case "sample":
                at_ns = int(line["t_monotonic_ns"]) + offset_ns
                if at_ns < self._from_ns:
                    return
                moments = self.moments.setdefault(self._node, array("q"))
                moments.append(at_ns)
                for name, value in line["values"].items():
                    if name in self._ids:
                        key = self._node, self._ids[name]
                        self.points.setdefault(key, _Points()).add(len(moments) - 1, float(value))
            case "source":
                known = self.unavailable.setdefault(self._node, {})
                known.pop(str(line["name"]), None)
                if line["text"]:
                    known[str(line["name"])] = str(line["text"])
            case _:
                self._take_of_rank(line, offset_ns)

    def _take_of_rank(self, line: dict[str, Any], offset_ns: int) -> None:
        match line["kind"]:
            case "spans":
                base_ns = int(line["base_ns"]) + offset_ns
                step = None if line["step"] is None else int(line["step"])
                for phase, start_ns, end_ns in line["spans"]:
                    if phase in PHASES and base_ns + int(end_ns) >= self._from_ns:
                        times_ns = base_ns + int(start_ns), base_ns + int(end_ns)
                        self.spans.add(phase, *times_ns, step, self._rank, self._node)
            case "memory" if int(line["t_monotonic_ns"]) + offset_ns >= self._from_ns:
                self.memory.add(
                    int(line["t_monotonic_ns"]) + offset_ns,
                    None if line["step"] is None else int(line["step"]),
                    self._rank,
                    self._node,
                    int(line["allocated_bytes"]),
                    int(line["reserved_bytes"]),
                    int(line["peak_bytes"]),
                )
            case "dropped":
                self.dropped_spans += int(line["spans"])


def _lines(file: Path) -> Iterator[Any]:
    """Yield the JSON values of a file's whole lines; skip lines that are not valid JSON."""
    with file.open("rb") as stream:
        for text in stream:
            if not text.endswith(b"\n"):
                return
            with contextlib.suppress(ValueError):  # a failing disk may damage lines
                yield json.loads(text)


def _files(folder: Path) -> list[Path]:
    """Return the files of a recording; the parts of each file are in the order of writing."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            part = match["part"]
            name = match["node"] or f"rank {int(match['rank']):09d}"
            found.append((match["node"] is None, unquote(name), part is None, int(part or 0), path))
    return [path for *_, path in sorted(found)]


def _series_order(item: tuple[tuple[str, SeriesId], Any]) -> tuple[Any, ...]:
    (node, key), _ = item
    device = -1 if key.device is None else key.device
    rank = -1 if key.rank is None else key.rank
    return (key.metric, node, device, rank, key.source, key.interval_s)
