"""Read CSV with an explicit schema, convert times to UTC, and report errors with their place.

Usually, one database statement reads the file with every column typed. Letting the database guess
the types would be slow on wide files, and wrong on columns that are empty at first. If the
statement fails, `faults` reads the file again to find the place and the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.notes import Note
from holdfast.trace.sources.csv import faults as csv_faults
from holdfast.trace.sources.csv.sql import MIXED, Columns, CsvSource
from holdfast.trace.sources.plain_text import csv_header, scan
from holdfast.trace.sources.reading import drops_bad_rows
from holdfast.trace.sources.sql import openable

if TYPE_CHECKING:
    import duckdb

NO_JOB: Final = "It holds no job."


@dataclass(frozen=True, kw_only=True)
class CsvRead:
    """The outcome of reading a CSV file."""

    rows: int
    dropped: int = 0
    """Number of unreadable rows that were dropped."""
    faults: Sequence[str] = ()
    """Place and reason of a few dropped rows, as text."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Number of rows for each zone offset; empty if the table has no `zone_offset`."""

    def notes(self, cluster: str) -> tuple[Note, ...]:
        """Return notes about the dropped rows and the zone offsets."""
        notes = []
        if self.dropped:
            sentence = f"{self.dropped} rows could not be read and are left out."
            notes.append(
                Note(
                    cluster=cluster, check="unreadable-row", sentence=sentence, rows=self.dropped, action="dropped",
                    examples=tuple(self.faults),
                )
            )  # fmt: skip
        if len(self.offsets) > 1:
            listed = ", ".join(f"{offset} ({count})" for offset, count in self.offsets.items())
            sentence = (
                f"Times are written with several zone offsets, {listed}; each is used as written."
            )
            fewer = sum(self.offsets.values()) - max(self.offsets.values())
            notes.append(
                Note(
                    cluster=cluster,
                    check="several-offsets",
                    sentence=sentence,
                    rows=fewer,
                    action="kept",
                )
            )
        return tuple(notes)


def read_csv(
    connection: "duckdb.DuckDBPyConnection",
    path: Path,
    *,
    columns: Columns,
    select: str,
    table: str,
    delimiter: str = ",",
    has_header: bool = True,
) -> CsvRead:
    """Create `table` from a CSV file, by a SELECT statement in which the file is named `source`.

    In `source`, a `Time` column is a TIMESTAMP in UTC without a zone. The additional column
    `zone_offset` has the offset of the row's times, or '' if they have none. If `select` uses
    `zone_offset`, the function fails for a file in which some times have an offset and others have
    none, because their order is unknown. Empty fields and NaN are NULL. Compression by gzip or
    Zstandard is recognised by the suffix of the file.

    Args:
        connection: the database; its `TimeZone` is UTC.
        path: the file; its header must have exactly the names in `columns`, in any order.
        columns: for each column of the file, its name and its DuckDB type (VARCHAR, DOUBLE, BIGINT,
            INTEGER) or a `Time`.
        select: `SELECT … FROM source`.
        table: name of the new table.
        delimiter: separator of the fields.
        has_header: False if the file has no header; its columns are then `columns`, in that order.

    Raises:
        BadTrace: the file cannot be read; the message has the line, the column and the expected
            type.
    """
    import duckdb

    header = csv_header(path, delimiter)
    _check_header(path, header if has_header else header and tuple(columns), columns)
    scan(path)
    with openable(connection, path) as file:
        source = CsvSource(
            file,
            [(name, columns[name]) for name in (header if has_header else columns)],
            delimiter,
            has_header,
        )
        dropped, faults = 0, tuple[str, ...]()
        try:
            connection.execute(
                f"CREATE OR REPLACE TABLE {table} AS WITH source AS ({source.typed()}) {select}"
            )
        except duckdb.IOException as error:
            message = str(error).partition("\n")[0]
            if "No space left" in message:  # There is no space for the table; the file is valid.
                raise
            next_step = "Check that the file is complete and is not being written."
            raise BadTrace(
                path, f"The file cannot be read: {message}.", next_step=next_step
            ) from error
        except (
            duckdb.InvalidInputException,
            duckdb.ConversionException,
            duckdb.OutOfRangeException,
            duckdb.NotImplementedException,
        ) as error:
            if not drops_bad_rows(connection):
                raise csv_faults.first_fault(connection, path, source, error) from error
            dropped, faults = csv_faults.bad_rows(connection, path, source)
            connection.execute(
                f"CREATE OR REPLACE TABLE {table} AS WITH source AS ({source.good()}) {select}"
            )
        offsets = _offsets(connection, table)
        if MIXED in offsets or ("" in offsets and len(offsets) > 1):
            raise csv_faults.mixed_offsets(connection, path, source)
    rows = connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]
    if not rows:
        raise BadTrace(
            path, NO_JOB, next_step="Give a file with at least one row under its header."
        )
    return CsvRead(rows=rows, dropped=dropped, faults=faults, offsets=offsets)


def _offsets(connection: "duckdb.DuckDBPyConnection", table: str) -> dict[str, int]:
    """Count the rows for each zone offset, most frequent first; empty without the column."""
    kept = [row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall()]
    if "zone_offset" not in kept:
        return {}
    counted = connection.execute(
        f"SELECT zone_offset, count(*) FROM {table} WHERE zone_offset IS NOT NULL GROUP BY ALL "
        "ORDER BY 2 DESC, 1"
    )
    return dict(counted.fetchall())


def _check_header(path: Path, header: Sequence[str], columns: Columns) -> None:
    if not header:
        raise BadTrace(
            path,
            "The file is empty." if not path.stat().st_size else NO_JOB,
            next_step="Give another one.",
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    missing = [name for name in columns if name not in header]
    extra = [name for name in header if name not in columns]
    faults = [
        f"{what} {', '.join(map(repr, names))}"
        for what, names in (("twice", twice), ("missing", missing), ("not expected", extra))
        if names
    ]
    if faults:
        raise BadTrace(
            path,
            f"The header does not fit this format; columns {'; '.join(faults)}.",
            line=1,
            next_step="Choose another format by --format, or describe the columns by --map.",
        )
