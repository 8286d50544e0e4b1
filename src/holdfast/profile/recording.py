"""A recording: the counters of each node and the phases of each rank of one run, in one folder.

    RUN/profile/samples-NODE.jsonl     counters, written by the node's sampler
    RUN/profile/spans-rankR.jsonl      phases and memory, written by the rank R

Each file has one writer at a time and holds one JSON object a line. A writer only appends whole
lines, so a file can be read while it is written. A killed writer loses at most the lines that it
had not written; a torn last line is left out by readers and cut off by the next writer. A file that
has reached `PART_BYTES` is renamed to `FILE.N`, with rising numbers; the oldest parts beyond
`KEPT_PARTS` are deleted. Each part can be read alone. The lines are:

| `kind` | fields |
|---|---|
| `begin` | `version`, `node`, `rank` (null in samples), `attempt`, `pid`: a writer opened the file or a new part |
| `clock` | `monotonic_ns`, `unix_ns`: the two clocks at one moment; repeated each minute |
| `series` | `id`, `metric`, `unit`, `source`, `device`, `rank`, `interval_s`: what `id` means until the next `begin` |
| `sample` | `t_monotonic_ns`, `values`: a number for each id |
| `source` | `name`, `text`: a source that cannot be read, and why; an empty text: the source is read |
| `spans` | `step`, `base_ns`, `spans`: `[phase, start, end]` for each span, in ns after the monotonic `base_ns` |
| `memory` | `t_monotonic_ns`, `step`, `allocated_bytes`, `reserved_bytes`, `peak_bytes` |
| `dropped` | `spans`: the spans that were left out because the disk was too slow |

Times in the files are monotonic, because a wall clock can be set. `Recording.read` converts them to
Unix nanoseconds by the newest `clock` line before them, so that one axis holds for all nodes, ranks
and incidents.
"""

import contextlib
import json
import os
import re
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from holdfast.core.errors import BadUse, NotFound
from holdfast.profile.incidents import IncidentMark
from holdfast.profile.metrics import METRICS, PHASES
from holdfast.profile.parts import MOST_BYTES, newest

VERSION: Final = 1
FOLDER: Final = "profile"
"""The folder of a recording below the folder of a run or of an evaluation."""
PART_BYTES: Final = 32 * 1024 * 1024
KEPT_PARTS: Final = 15
"""The finished parts of a file that are kept beside the newest one."""
CLOCK_EVERY_NS: Final = 60_000_000_000
STEADY_NS: Final = 1_000_000
"""Smaller changes between wall clock and monotonic clock are errors of reading them."""
TOTALS: Final = ("J", "s", "B")
_TAIL_BYTES: Final = 1 << 16
_FILE: Final = re.compile(
    r"(samples-(?P<node>.+)|spans-rank(?P<rank>\d+))\.jsonl(\.(?P<part>\d+))?"
)


@dataclass(frozen=True, slots=True)
class SeriesId:
    """The metric, the device and the source of a series.

    Attributes:
        metric: a name of `metrics.METRICS`.
        source: the name of the source that measures it.
        device: the GPU's index on its node; None for a metric of the host.
        rank: the rank whose process is measured; None if the metric is of no single rank.
        interval_s: seconds between two samples.
    """

    metric: str
    source: str
    device: int | None = None
    rank: int | None = None
    interval_s: float = 1.0

    @property
    def unit(self) -> str:
        """Return the unit of the values."""
        return METRICS[self.metric].unit


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one metric of one device, rank or node, in the order of time.

    Attributes:
        times_ns: Unix nanoseconds of each value.
        values: the values in `unit`; as many as times.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One phase of one rank.

    Attributes:
        phase: a name of `metrics.PHASES`.
        start_ns: the beginning, in nanoseconds: Unix time if read, monotonic time if written.
        end_ns: the end, on the same clock as `start_ns`.
        step: the step during which the phase ran; None outside of steps.
    """

    phase: str
    start_ns: int
    end_ns: int
    step: int | None
    rank: int
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """The device memory of one rank's PyTorch at one moment.

    Attributes:
        at_ns: nanoseconds: Unix time if read, monotonic time if written.
        allocated_bytes: bytes of live tensors.
        reserved_bytes: bytes that the allocator holds.
        peak_bytes: the most allocated bytes since the record before.
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
    """The two clocks of one node at one moment, in nanoseconds."""

    node: str
    monotonic_ns: int
    unix_ns: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All that was recorded of one run.

    Attributes:
        series: sorted by metric, node, device and rank.
        spans: sorted by rank and start; a span that lies inside another one comes after it.
        memory: sorted by rank and time.
        clocks: the readings of all files, in the files' order.
        incidents: sorted by start.
        unavailable: for each node, the sources that cannot be read, and why.
        dropped_spans: the spans that were left out because a disk was too slow.
        left_out_bytes: the size of older parts that were not read.
    """

    series: tuple[Series, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[MemoryUse, ...] = ()
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
        most_bytes: int = MOST_BYTES,
    ) -> Self:
        """Read the files of a folder, which may still be written.

        Args:
            folder: the folder of the recording, `RUN/profile`.
            incidents: the incidents of the run, see `incidents.incidents_of`.
            most_bytes: the most bytes of files that are read, from the newest part on.

        Raises:
            NotFound: the folder holds no recording.
            BadUse: a newer version of Holdfast has written the recording.
        """
        files = _files(folder)
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
                    times_ns=times,
                    values=values,
                )
                for (node, key), (times, values) in sorted(reader.points.items(), key=_series_order)
            ),
            spans=tuple(
                sorted(reader.spans, key=lambda one: (one.rank, one.start_ns, -one.end_ns))
            ),
            memory=tuple(sorted(reader.memory, key=lambda one: (one.rank, one.at_ns))),
            clocks=tuple(reader.clocks),
            incidents=tuple(sorted(incidents, key=lambda one: one.start_ns)),
            unavailable={node: dict(sources) for node, sources in reader.unavailable.items()},
            dropped_spans=reader.dropped_spans,
            left_out_bytes=chosen.left_out_bytes,
        )

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that recorded phases or memory, in rising order."""
        return sorted({one.rank for one in self.spans} | {one.rank for one in self.memory})

    def of(self, metric: str) -> list[Series]:
        """Return all series of one metric."""
        return [one for one in self.series if one.metric == metric]


class RecordingWriter:
    """Appends to one file of a recording. Use a writer in one thread only.

    A method that raises `OSError` has written none of its line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        rank: int | None = None,
        attempt: int = 0,
        part_bytes: int = PART_BYTES,
        kept_parts: int = KEPT_PARTS,
        clocks: Callable[[], tuple[int, int]] = lambda: (time.monotonic_ns(), time.time_ns()),
    ) -> None:
        """Open the file, make its folder, and cut off a line that a killed writer left torn.

        Args:
            folder: the folder of the recording.
            node: the name of the node.
            rank: the rank whose phases are written; None: counters of the node are written.
            attempt: the number of the run's attempt.
            part_bytes: the size at which a new part begins.
            kept_parts: the finished parts that are kept.
            clocks: returns the monotonic clock and the Unix clock, in ns.

        Raises:
            OSError: the file cannot be opened.
        """
        name = f"samples-{quote(node, safe='')}" if rank is None else f"spans-rank{rank}"
        self.path = folder / f"{name}.jsonl"
        self._begin = {
            "kind": "begin",
            "version": VERSION,
            "node": node,
            "rank": rank,
            "attempt": attempt,
            "pid": os.getpid(),
        }
        self._part_bytes = part_bytes
        self._kept_parts = kept_parts
        self._clocks = clocks
        self._ids: dict[SeriesId, int] = {}
        self._clock_due_ns = 0
        self._fd = -1
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def sample(self, t_monotonic_ns: int, values: Mapping[SeriesId, float]) -> None:
        """Write the values of one moment."""
        if not values:
            return
        if self._fd < 0:
            self._open()
        lines: list[dict[str, Any]] = []
        new: dict[SeriesId, int] = {}
        for key in values:
            if key not in self._ids:
                number = new[key] = len(self._ids) + len(new)
                lines.append(
                    {
                        "kind": "series",
                        "id": number,
                        "metric": key.metric,
                        "unit": key.unit,
                        "source": key.source,
                        "device": key.device,
                        "rank": key.rank,
                        "interval_s": key.interval_s,
                    }
                )
        ids = self._ids | new if new else self._ids
        numbers = {str(ids[key]): _short(key.unit, value) for key, value in values.items()}
        lines.append({"kind": "sample", "t_monotonic_ns": t_monotonic_ns, "values": numbers})
        self._write(lines, new)

    def source(self, name: str, text: str) -> None:
        """Write that a source cannot be read, and why; an empty text: the source is read."""
        self._write([{"kind": "source", "name": name, "text": text}])

    def spans(self, step: int | None, spans: Sequence[tuple[str, int, int]]) -> None:
        """Write the phases of one step: name, start and end of each, in monotonic ns."""
        if not spans:
            return
        base_ns = min(start_ns for _, start_ns, _ in spans)
        rows = [[phase, start - base_ns, end - base_ns] for phase, start, end in spans]
        self._write([{"kind": "spans", "step": step, "base_ns": base_ns, "spans": rows}])

    def memory(
        self,
        t_monotonic_ns: int,
        step: int | None,
        *,
        allocated_bytes: int,
        reserved_bytes: int,
        peak_bytes: int,
    ) -> None:
        """Write the memory of the rank's device, see `MemoryUse`."""
        fields = {
            "kind": "memory",
            "t_monotonic_ns": t_monotonic_ns,
            "step": step,
            "allocated_bytes": allocated_bytes,
            "reserved_bytes": reserved_bytes,
            "peak_bytes": peak_bytes,
        }
        self._write([fields])

    def dropped(self, spans: int) -> None:
        """Write that so many spans were left out."""
        self._write([{"kind": "dropped", "spans": spans}])

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            self._ids.clear()
            _cut_torn_line(self._fd)
            monotonic_ns, _ = self._clocks()
            self._append([self._begin, self._clock_line(monotonic_ns)])
        except BaseException:
            self.close()
            raise

    def _clock_line(self, now_ns: int) -> dict[str, Any]:
        self._clock_due_ns = now_ns + CLOCK_EVERY_NS
        monotonic_ns, unix_ns = self._clocks()
        return {"kind": "clock", "monotonic_ns": monotonic_ns, "unix_ns": unix_ns}

    def _write(
        self, lines: list[dict[str, Any]], new: Mapping[SeriesId, int] | None = None
    ) -> None:
        if self._fd < 0:
            self._open()
        monotonic_ns, _ = self._clocks()
        if monotonic_ns >= self._clock_due_ns:
            lines.insert(0, self._clock_line(monotonic_ns))
        size_bytes = self._append(lines)
        self._ids.update(new or {})
        if size_bytes >= self._part_bytes:
            with contextlib.suppress(OSError):  # the lines are written; the next call tries again
                self._begin_part()

    def _append(self, lines: list[dict[str, Any]]) -> int:
        """Write lines; return the size of the file. One write: a reader sees whole lines."""
        start_bytes = os.fstat(self._fd).st_size
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, start_bytes)
            raise
        return start_bytes + len(text)

    def _begin_part(self) -> None:
        self.close()  # the next call opens what then has the name
        parts = sorted(_parts_of(self.path))
        number = parts[-1] + 1 if parts else 1
        self.path.rename(f"{self.path}.{number}")
        for old in parts[: max(0, len(parts) + 1 - self._kept_parts)]:
            Path(f"{self.path}.{old}").unlink(missing_ok=True)


class _Reader:
    """Collects the records of all files."""

    def __init__(self, from_ns: int) -> None:
        self._from_ns = from_ns
        self.points: dict[tuple[str, SeriesId], tuple[array[int], array[float]]] = {}
        self.spans: list[Span] = []
        self.memory: list[MemoryUse] = []
        self.clocks: list[ClockReading] = []
        self.unavailable: dict[str, dict[str, str]] = {}
        self.dropped_spans = 0
        self._node, self._rank = "", 0
        self._ids: dict[str, SeriesId] = {}
        self._offsets_ns: dict[str, int] = {}
        """For each node, what turns its monotonic time into Unix time."""

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
                # Else spans that touch would overlap by the error of the reading.
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
                for name, value in line["values"].items():
                    if name in self._ids and at_ns >= self._from_ns:
                        times, values = self.points.setdefault(
                            (self._node, self._ids[name]), (array("q"), array("d"))
                        )
                        number = float(value)
                        times.append(at_ns)
                        values.append(number)
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
                self.spans.extend(
                    Span(
                        phase=sys.intern(phase),
                        start_ns=base_ns + int(start_ns),
                        end_ns=base_ns + int(end_ns),
                        step=None if line["step"] is None else int(line["step"]),
                        rank=self._rank,
                        node=self._node,
                    )
                    for phase, start_ns, end_ns in line["spans"]
                    if phase in PHASES and base_ns + int(end_ns) >= self._from_ns
                )
            case "memory" if int(line["t_monotonic_ns"]) + offset_ns >= self._from_ns:
                self.memory.append(
                    MemoryUse(
                        at_ns=int(line["t_monotonic_ns"]) + offset_ns,
                        step=None if line["step"] is None else int(line["step"]),
                        rank=self._rank,
                        node=self._node,
                        allocated_bytes=int(line["allocated_bytes"]),
                        reserved_bytes=int(line["reserved_bytes"]),
                        peak_bytes=int(line["peak_bytes"]),
                    )
                )
            case "dropped":
                self.dropped_spans += int(line["spans"])


def _lines(file: Path) -> Iterator[Any]:
    """Yield the whole lines of a file; a line that is no JSON is left out."""
    with file.open("rb") as stream:
        for text in stream:
            if not text.endswith(b"\n"):
                return
            with contextlib.suppress(ValueError):  # of a disk that fails
                yield json.loads(text)


def _files(folder: Path) -> list[Path]:
    """Return the files of a recording, each with its parts in the order of writing."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            part = match["part"]
            name = match["node"] or f"rank {int(match['rank']):09d}"
            found.append((match["node"] is None, unquote(name), part is None, int(part or 0), path))
    return [path for *_, path in sorted(found)]


def _parts_of(path: Path) -> list[int]:
    prefix = f"{path.name}."
    return [
        int(number)
        for one in path.parent.iterdir()
        if one.name.startswith(prefix) and (number := one.name.removeprefix(prefix)).isdigit()
    ]


def _cut_torn_line(fd: int) -> None:
    size_bytes = end_bytes = os.fstat(fd).st_size
    while end_bytes > 0:
        start_bytes = max(0, end_bytes - _TAIL_BYTES)
        newline = os.pread(fd, end_bytes - start_bytes, start_bytes).rfind(b"\n")
        if newline >= 0:
            end_bytes = start_bytes + newline + 1
            break
        end_bytes = start_bytes
    if end_bytes < size_bytes:
        os.ftruncate(fd, end_bytes)


def _short(unit: str, value: float) -> float:
    """Return a number with few digits.

    Totals that only grow keep more, because readers subtract them.
    """
    rounded = float(f"{value:.12g}" if unit in TOTALS else f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


def _series_order(item: tuple[tuple[str, SeriesId], Any]) -> tuple[Any, ...]:
    (node, key), _ = item
    device = -1 if key.device is None else key.device
    rank = -1 if key.rank is None else key.rank
    return (key.metric, node, device, rank, key.source, key.interval_s)
