"""Read text files as bytes or lines, and reject files that would harm a parser."""

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
"""The longest line that a trace may have; it is also the database's default limit."""
_BLOCK_BYTES: Final = 1 << 20


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, and decompress it if its suffix says so.

    Raises:
        OSError: the file cannot be read; also EOFError or zlib.error if the content does not match
            the suffix.
    """
    if path.suffix == ".gz":
        with gzip.open(path) as unpacked:
            yield unpacked  # type: ignore[misc]  # GzipFile reads bytes; it is no IO in name alone
    else:
        with path.open("rb") as file:
            yield file


def head(path: Path, size_bytes: int = 65536) -> str:
    """Return the first bytes of a file as text; empty for a folder or an unreadable file."""
    try:
        if path.suffix == ".zst":
            return _zstd_head(path)
        with opened(path) as file:
            return file.read(size_bytes).decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""


def csv_header(path: Path, delimiter: str = ",") -> tuple[str, ...]:
    """Return the column names in the first line of a CSV file; empty if the first line is empty."""
    line = head(path).lstrip("\ufeff").replace("\r", "\n").partition("\n")[0]
    if not line.strip():
        return ()
    return tuple(name.strip() for name in next(csv.reader([line], delimiter=delimiter)))


def _zstd_head(path: Path) -> str:
    """Return the first line, as read by the database.

    Python's own library reads Zstandard only from 3.14 on.
    """
    import duckdb

    with duckdb.connect(config={"temp_directory": ""}) as connection:
        try:
            line = connection.execute(
                "SELECT line FROM read_csv($1, auto_detect=false, header=false, delim='\x01', "
                "quote='', escape='', "
                "columns={line: 'VARCHAR'}) LIMIT 1",
                [str(path)],
            ).fetchone()
        except duckdb.Error:
            return ""
    return str(line[0]) if line else ""


def scan(path: Path) -> None:
    """Reject a file that has an extremely long line or a NUL byte.

    Such a line would need unbounded memory, and a NUL byte would cut a text without an error. A
    file compressed by Zstandard is not checked.

    Raises:
        BadTrace: the file is rejected; the message has the line.
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
                        next_step=(
                            "Restore the file from its origin, or remove them: tr -d '\\000' "
                            "< FILE."
                        ),
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
            next_step="Check that it is complete and readable.",
        ) from error


def too_long(path: Path, line: int) -> BadTrace:
    """Return the error for an extremely long line."""
    problem = f"The line is longer than {LONGEST_LINE_BYTES} bytes, longer than any row of a trace."
    return BadTrace(path, problem, line=line, next_step="Check that the file is complete text.")


def open_quote(path: Path) -> int | None:
    """Return the line of the quote that is still open at the end of a file.

    Return None if there is no such quote, or if its line is unknown.
    """
    if path.suffix == ".zst":
        return None
    opened_at: int | None = None
    with opened(path) as file:
        for line, text in enumerate(file, start=1):
            if text.count(b'"') % 2 == 1:
                opened_at = line if opened_at is None else None
    return opened_at


def line_at(path: Path, byte: int) -> int:
    """Return the line number (from 1) of the row at a byte position that the database reported."""
    line = 1
    with opened(path) as file:
        while byte > 0 and (block := file.read(min(byte, _BLOCK_BYTES))):
            line += block.count(b"\n")
            byte -= len(block)
        # In files with \r\n, the database returns the position of the \n.
        return line + (file.read(1) == b"\n")


def line_of_record(path: Path, record: int) -> int:
    """Return the first line of a CSV record. The header is record 0; empty lines do not count."""
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
    r"""Open a file for reading text, without its byte order mark.

    Only `\n` ends a line. Bytes that are not UTF-8 are replaced.

    Raises:
        BadTrace: the file cannot be opened, or a later read fails.
    """
    if path.suffix == ".zst":  # Python reads Zstandard only from 3.14 on.
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
            next_step="Check that it is complete and readable.",
        ) from error


def cluster_name(path: Path) -> str:
    """Return the default name of a cluster: the file's name up to its first dot."""
    return path.name.partition(".")[0] or path.name
