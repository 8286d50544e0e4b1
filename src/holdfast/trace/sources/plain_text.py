"""Text files byte by byte or as a stream: their header, their lines, and what no parser should be given."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TextIO, cast

from holdfast.trace.errors import BadTrace

LONGEST_LINE_BYTES: Final = 2_000_000
"""No row of a trace is longer; what the database takes at most, unless told otherwise."""
_BLOCK_BYTES: Final = 1 << 20


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked where its suffix says that it is compressed.

    Raises:
        OSError: it cannot be read; also EOFError or zlib.error where it is not compressed as its name says.
    """
    if path.suffix == ".gz":
        with gzip.open(path) as unpacked:
            yield unpacked  # type: ignore[misc]  # GzipFile reads bytes; it is no IO in name alone
    else:
        with path.open("rb") as file:
            yield file


def head(path: Path, size_bytes: int = 65536) -> str:
    """The first bytes of a file as text; empty where it is a folder or cannot be read."""
    try:
        if path.suffix == ".zst":
            return _zstd_head(path)
        with opened(path) as file:
            return file.read(size_bytes).decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""


def csv_header(path: Path, delimiter: str = ",") -> tuple[str, ...]:
    """The names in the first line of a CSV file; empty where there is none."""
    line = head(path).lstrip("\ufeff").replace("\r", "\n").partition("\n")[0]
    if not line.strip():
        return ()
    return tuple(name.strip() for name in next(csv.reader([line], delimiter=delimiter)))


def _zstd_head(path: Path) -> str:
    """The first line, by the database, since Python reads Zstandard from 3.14 only."""
    import duckdb

    with duckdb.connect(config={"temp_directory": ""}) as connection:
        try:
            line = connection.execute(
                "SELECT line FROM read_csv($1, auto_detect=false, header=false, delim='\x01', quote='', escape='', "
                "columns={line: 'VARCHAR'}) LIMIT 1",
                [str(path)],
            ).fetchone()
        except duckdb.Error:
            return ""
    return str(line[0]) if line else ""


def scan(path: Path) -> None:
    """Refuse what would cost unbounded memory or be cut in silence: an endless line, a NUL byte.

    A file compressed by Zstandard is not looked into.

    Raises:
        BadTrace: with the line.
    """
    if path.suffix == ".zst":
        return
    line, since_bytes = 1, 0
    try:
        with opened(path) as file:
            while block := file.read(_BLOCK_BYTES):
                if b"\0" in block:
                    at = line + block[: block.index(b"\0")].count(b"\n")
                    raise BadTrace(
                        path,
                        "There is a NUL byte, where text was expected.",
                        line=at,
                        next_step="Restore the file from its origin, or remove them: tr -d '\\000' < FILE.",
                    )
                end = max(block.rfind(b"\n"), block.rfind(b"\r"))
                since_bytes = since_bytes + len(block) if end < 0 else len(block) - end - 1
                if since_bytes > LONGEST_LINE_BYTES:
                    raise too_long(path, line + block.count(b"\n"))
                line += block.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(
            path,
            f"The file cannot be read: {error}.",
            next_step="Check that it is whole and readable.",
        ) from error


def too_long(path: Path, line: int) -> BadTrace:
    """An error about an endless line."""
    problem = f"The line is longer than {LONGEST_LINE_BYTES} bytes, which no row of a trace is."
    return BadTrace(path, problem, line=line, next_step="Look whether the file is text, and whole.")


def open_quote(path: Path) -> int | None:
    """The line on which the quote opens that the file's end leaves open; None where none is, or none can be told."""
    if path.suffix == ".zst":
        return None
    opened_at: int | None = None
    with opened(path) as file:
        for line, text in enumerate(file, start=1):
            if text.count(b'"') % 2 == 1:
                opened_at = line if opened_at is None else None
    return opened_at


def line_at(path: Path, byte: int) -> int:
    """Which line of the file, from 1, a row is on that the database says begins at the byte."""
    line = 1
    with opened(path) as file:
        while byte > 0 and (block := file.read(min(byte, _BLOCK_BYTES))):
            line += block.count(b"\n")
            byte -= len(block)
        # Where lines end by \r\n the database has the row begin at the \n.
        return line + (file.read(1) == b"\n")


def line_of_record(path: Path, record: int) -> int:
    """The line on which a record of a CSV file begins; the header is record 0, empty lines are none."""
    seen, inside_quotes = -1, False
    with opened(path) as file:
        for line, text in enumerate(file, start=1):
            seen += not inside_quotes and bool(text.strip())
            if seen == record:
                return line
            inside_quotes ^= text.count(b'"') % 2 == 1
    return record + 1


@contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    r"""The file's text, without a byte order mark; only `\n` ends a line, and what is no UTF-8 is replaced.

    Raises:
        BadTrace: it cannot be read, also while it is being read.
    """
    if path.suffix == ".zst":  # which Python reads from 3.14 only
        raise BadTrace(path, "It is compressed by Zstandard.", next_step="Unpack it: zstd -d FILE.")
    try:
        with opened(path) as file:
            yield io.TextIOWrapper(
                cast("io.BufferedReader", file), "utf-8-sig", errors="replace", newline="\n"
            )
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(
            path,
            f"The file cannot be read: {error}.",
            next_step="Check that it is whole and readable.",
        ) from error


def cluster_name(path: Path) -> str:
    """What a cluster is called whose records do not say: the file's name up to its first dot."""
    return path.name.partition(".")[0] or path.name
