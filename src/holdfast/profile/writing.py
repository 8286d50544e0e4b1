"""Append lines to a file of a recording; `recording` describes the format of the lines."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from holdfast.profile.recording import VERSION, SeriesId

PART_BYTES: Final = 32 * 1024 * 1024
KEPT_PARTS: Final = 15
"""The number of finished parts of a file that are kept beside the current part."""
CLOCK_EVERY_NS: Final = 60_000_000_000
TOTALS: Final = ("J", "s", "B")
_TAIL_BYTES: Final = 1 << 16


class RecordingWriter:
    """Append lines to one file of a recording. Use a writer only from one thread.

    If a method raises `OSError`, it has written no part of its line.
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
        """Open the file for appending. Create its folder, and remove an incomplete last line.

        A writer that was killed may have left such a line.

        Args:
            folder: the folder of the recording.
            node: the name of the node.
            rank: the rank whose phases are written; None to write counters of the node.
            attempt: the number of the attempt within the run.
            part_bytes: the size at which a new part of the file is started.
            kept_parts: the number of finished parts that are kept.
            clocks: returns the monotonic time and the Unix time, in ns.

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
        """Write one sample: the values of several series at one moment."""
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
        """Write why a source cannot be read, or an empty text if the source can be read again."""
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
        """Write one record of the rank's device memory, with the fields of `MemoryUse`."""
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
        """Write the number of spans that were dropped."""
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
        """Append lines to the file, and return the new size of the file.

        All lines are written in one call, so that a reader sees whole lines. If the call fails, the
        file is cut back to its former size.
        """
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
        self.close()  # the next call opens the file that then has this name
        parts = sorted(_parts_of(self.path))
        number = parts[-1] + 1 if parts else 1
        self.path.rename(f"{self.path}.{number}")
        for old in parts[: max(0, len(parts) + 1 - self._kept_parts)]:
            Path(f"{self.path}.{old}").unlink(missing_ok=True)


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
    """Round a value to 4 significant digits, or to 12 for a counter that only increases.

    Counters keep more digits because readers subtract their values.
    """
    rounded = float(f"{value:.12g}" if unit in TOTALS else f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded
