"""Read wide CSV, the format in which AcmeTrace publishes telemetry.

The first column is `Time`, followed by one column for each device. Files have hundreds to thousands
of devices. A file is read as bytes, one block of whole lines at a time. The positions of the
separators give the start and length of each field. A dictionary then gives the field's value, so
that each distinct number is parsed only once. Memory holds only a few blocks and the distinct
fields, for any file size. Each thread of `scan` reads a part of the file.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Final, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.trace.errors import BadTrace
from holdfast.trace.telemetry.dictionary import PADDING_BYTES, Ids
from holdfast.trace.telemetry.values import BadField, FieldValues, Values

BLOCK_BYTES: Final = 1 << 18
"""Bytes of a block, so small that a block and its arrays fit into the cache of a CPU core."""
LONGEST_LINE_BYTES: Final = 1 << 24
"""Longest line: a hundred thousand devices at 160 bytes each.

Each thread may have to hold a few such lines.
"""
FIRST_LINES: Final = 8
COMMA, NEWLINE = 44, 10
_NO_DEVICES: Final = frozenset(
    {"gpu", "gpu_id", "gpu_index", "hostname", "index", "metric", "metric_name", "uuid", "val", "value"}
)  # fmt: skip
"""Names of columns, in lower case, that show that a table is long and not wide."""
TIME_NAMES: Final = frozenset({"time", "timestamp", "ts", "date", "datetime", ""})


@dataclass(frozen=True, kw_only=True)
class WideFile:
    """The properties of a wide file that its first lines show."""

    path: Path
    devices: tuple[str, ...]
    """Names of all columns except the first."""
    time_column: str
    body: int
    """Byte position of the second line."""
    size_bytes: int
    interval_s: float
    """Seconds between samples, which is the most frequent step in the first lines.

    It is NaN if there are fewer than two such lines.
    """


@dataclass(frozen=True)
class Block:
    """Some consecutive whole lines of a file."""

    at_us: npt.NDArray[np.int64]
    """Times in microseconds since the epoch, UTC, of shape (rows,)."""
    table: Values
    """The value of each id; if there are no ids, the values of the fields."""
    ids: Ids | None
    """The dictionary's id of each field, shape (rows, devices); None without a dictionary."""
    offsets: frozenset[str]
    """The UTC offsets written in these lines; '' for lines without an offset."""
    size_bytes: int
    """Size in bytes of the lines in the file."""

    @cached_property
    def values(self) -> Values:
        """Return the values in the metric's unit, of shape (rows, devices); NaN if missing."""
        return self.table if self.ids is None else self.table.take(self.ids, mode="clip")

    def rows(self, chosen: list[int]) -> "Block":
        """Return a block with only the chosen rows."""
        if self.ids is None:
            return Block(
                self.at_us[chosen], self.table[chosen], None, self.offsets, self.size_bytes
            )
        return Block(
            self.at_us[chosen], self.table, self.ids[chosen], self.offsets, self.size_bytes
        )


def open_wide(path: Path) -> WideFile:
    """Read the header and the first lines of a wide file.

    Raises:
        BadTrace: the file is not wide CSV.
    """
    try:
        with path.open("rb") as file:
            header = file.readline(LONGEST_LINE_BYTES)
            stamps = _first_stamps(file)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadTrace(
            path, f"cannot be read ({error.strerror}).", next_step="Check the path."
        ) from error
    if len(header) == LONGEST_LINE_BYTES:
        raise _too_long(path, line=1)
    text = header.decode("utf-8", errors="replace").lstrip("\ufeff").strip("\r\n")
    names = _names(text)
    if len(names) < 2 or names[0].strip().lower() not in TIME_NAMES:
        raise BadTrace(
            path,
            f"this is no wide table: its first column is {names[0] if names else ''!r}, expected `Time`.",
            line=1,
            next_step="Give a CSV file whose first line is `Time` and the names of the devices.",
        )
    if odd := sorted(_NO_DEVICES & {name.strip().lower() for name in names[1:]}):
        raise BadTrace(
            path,
            f"this is no wide table: its column {odd[0]!r} is no device.",
            line=1,
            next_step="Give a column for each device, or a long table with the columns time, device and value.",
        )
    steps = np.diff(stamps)
    values, counts = np.unique(steps[steps > 0], return_counts=True)
    return WideFile(
        path=path,
        devices=tuple(name.strip() for name in names[1:]),
        time_column=names[0],
        body=len(header),
        size_bytes=size_bytes,
        interval_s=float(values[counts.argmax()]) / 1e6 if len(values) else float("nan"),
    )


def _names(header: str) -> list[str]:
    """Return the names of the columns; empty if the line cannot be the header of a text file."""
    try:
        return next(csv.reader([header]), []) if header.isprintable() else []
    except csv.Error:
        return []


def _first_stamps(file: IO[bytes]) -> list[int]:
    """Parse the times in the first lines.

    Parsing stops at a line that is too long. When all lines are read later, that line is reported.
    """
    stamps = []
    for _ in range(FIRST_LINES):
        line = file.readline(LONGEST_LINE_BYTES)
        if (stamp := parse_stamp(line.partition(b",")[0])) is not None:
            stamps.append(stamp)
        if not line.endswith(b"\n"):
            break
    return stamps


def _too_long(path: Path, line: int) -> BadTrace:
    return BadTrace(
        path, f"a line is longer than {LONGEST_LINE_BYTES >> 20} MiB.", line=line,
        next_step="Give a table with a line for each time, or fetch the file again if it was damaged.",
    )  # fmt: skip


def parse_stamp(field: bytes) -> int | None:
    """Convert the bytes of a time to microseconds since the epoch; None if the time is invalid."""
    try:
        return parse_time(field.decode("ascii"))[0]
    except ValueError:
        return None


def parts(wide: WideFile, number: int) -> list[tuple[int, int]]:
    """Divide the lines after the header into at most `number` byte ranges of similar size.

    Each range consists of whole lines, and the ranges are in the file's order.
    """
    cuts = [wide.body]
    with wide.path.open("rb") as file:
        for part in range(1, number):
            file.seek(
                max(wide.body, wide.body + (wide.size_bytes - wide.body) * part // number - 1)
            )
            # If there is no line end within the longest line, no range starts here. The reader of
            # the previous range then reports that the line is too long.
            if file.readline(LONGEST_LINE_BYTES).endswith(b"\n"):
                cuts.append(file.tell())
    cuts.append(wide.size_bytes)
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def blocks(
    wide: WideFile, fields: FieldValues, low: int, high: int, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Yield the lines between the bytes `low` and `high`, one block at a time.

    Args:
        wide: the file.
        fields: converts fields to values.
        low: byte position of the start of a line.
        high: byte position of the end of a line.
        block_bytes: approximate size of a block; a longer line is held as a whole.

    Raises:
        BadTrace: a line has too many or too few fields, or a field is not a number or a time; the
            message has the place.
    """
    with wide.path.open("rb", buffering=0) as file:
        file.seek(low)
        buffer = bytearray(max(block_bytes, 2 * wide.body) + PADDING_BYTES)
        held, position, begins = 0, low, low
        while position < high or held:
            room = min(len(buffer) - PADDING_BYTES - held, high - position)
            got = file.readinto(memoryview(buffer)[held : held + room]) if room else 0
            position += got
            held += got
            if position >= high and held and buffer[held - 1] != NEWLINE:
                buffer[held] = NEWLINE
                held += 1
            whole = buffer.rfind(b"\n", 0, held) + 1
            if not whole:
                if held > LONGEST_LINE_BYTES:
                    raise _too_long(wide.path, _line_at(wide.path, begins))
                buffer.extend(bytes(len(buffer)))
                continue
            yield from _read_block(wide, fields, buffer, whole, begins)
            begins += whole
            rest = bytes(memoryview(buffer)[whole:held])
            buffer[: len(rest)] = rest
            held = len(rest)


def _read_block(
    wide: WideFile, fields: FieldValues, buffer: bytearray, whole: int, begins: int
) -> Iterator[Block]:
    text = np.frombuffer(buffer, dtype=np.uint8, count=whole)
    separates = text == COMMA
    separates |= text == NEWLINE
    ends = np.flatnonzero(separates)
    columns = len(wide.devices) + 1
    rows, over = divmod(len(ends), columns)
    if (
        over
        or (text[ends[columns - 1 :: columns]] != NEWLINE).any()
        or buffer.count(b"\n", 0, whole) != rows
    ):
        del text  # A view would prevent the buffer from changing its size.
        mended = _without_blank_lines(wide, bytes(memoryview(buffer)[:whole]), begins)
        if mended:
            padded = bytearray(mended + bytes(PADDING_BYTES))
            yield from _read_block(wide, fields, padded, len(mended), begins)
        return
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    lengths = ends - starts
    stamps = slice(None, None, columns)
    at_us, offsets = _times(wide, buffer, starts[stamps], ends[stamps], begins)
    # Look up the time stamps as empty fields, which is cheaper than removing them from the arrays.
    lengths[stamps] = 0
    try:
        table, ids = fields.look_up(buffer, starts, lengths)
    except BadField as bad:
        _fail_at_field(wide, buffer, starts, lengths, begins, bad.args[0])
    if ids is None:
        yield Block(at_us, table.reshape(rows, columns)[:, 1:], None, offsets, whole)
    else:
        yield Block(at_us, table, ids.reshape(rows, columns)[:, 1:], offsets, whole)


def _times(
    wide: WideFile, buffer: bytearray, starts: Ids, ends: Ids, begins: int
) -> tuple[npt.NDArray[np.int64], frozenset[str]]:
    at_us, offsets = np.empty(len(starts), dtype=np.int64), set()
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        try:
            at_us[row], offset = parse_time(buffer[start:end].decode("ascii"))
        except ValueError:
            shown = buffer[start : min(end, start + 40)].decode("utf-8", errors="replace")
            _fail(wide, begins + start, f"{shown!r} is not a time stamp.", column=wide.time_column)
        offsets.add(offset)
    return at_us, frozenset(offsets)


def _without_blank_lines(wide: WideFile, text: bytes, begins: int) -> bytes:
    """Return the lines that are not blank, and check the number of fields of each line."""
    kept, place = [], begins
    for line in text.splitlines(keepends=True):
        if line.strip():
            fields = line.count(b",") + 1
            if fields != len(wide.devices) + 1:
                _fail(
                    wide,
                    place,
                    f"{fields} fields, where the first line has {len(wide.devices) + 1}.",
                )
            kept.append(line)
        place += len(line)
    return b"".join(kept)


def _fail_at_field(
    wide: WideFile, buffer: bytearray, starts: Ids, lengths: Ids, begins: int, field: bytes
) -> NoReturn:
    for place in np.flatnonzero(lengths == len(field)).tolist():
        start = int(starts[place])
        if buffer[start : start + len(field)] == field:
            column = wide.devices[place % (len(wide.devices) + 1) - 1]
            shown = field[:40].decode("utf-8", errors="replace")
            _fail(wide, begins + start, f"{shown!r} is not a number.", column=column)
    raise AssertionError(f"{field!r} was read and is not there")


def _fail(wide: WideFile, place: int, problem: str, *, column: str | None = None) -> NoReturn:
    raise BadTrace(
        wide.path, problem, line=_line_at(wide.path, place), column=column,
        next_step="Correct or delete that line, or fetch the file again if it was cut off.",
    )  # fmt: skip


def _line_at(path: Path, place: int) -> int:
    line, left = 1, place
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            line += piece.count(b"\n")
            left -= len(piece)
    return line


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> tuple[int, str]:
    """Convert a time to microseconds since the Unix epoch, and return its UTC offset as written.

    A time without an offset is in UTC, and its offset is ''. The forms are `2023-07-01
    08:00:00+08:00`, `2023-07-01T00:00:00Z`, `2023-07-01 00:00:00` and `1688169600` (also with
    decimals, or in milliseconds).

    Raises:
        ValueError: the text has none of these forms.
    """
    text = text.strip().strip('"')
    number = text.replace(".", "", 1)
    if number.isascii() and number.isdigit() and "-" not in text:
        seconds = float(text)
        if 1e11 <= seconds < 1e14:  # milliseconds, as in Prometheus and JavaScript
            seconds /= 1000
        if not 1e8 <= seconds < 1e11:
            raise ValueError(text)
        return round(seconds * 1e6), "Z"
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        return _microseconds(moment.replace(tzinfo=UTC)), ""
    return _microseconds(moment), "Z" if text.endswith("Z") else text[19:].lstrip(".0123456789")


def _microseconds(moment: datetime) -> int:
    # Use whole numbers throughout: a float of seconds would lose the microsecond.
    passed = moment - EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
