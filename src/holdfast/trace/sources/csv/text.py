"""Reading CSV: an explicit schema from the header, times to UTC by their offset, and errors that say where.

The quick way is one statement of the database with every column typed (its own guessing is slow on wide files and
wrong on columns that are silent at first). Where that fails, `csv_faults` reads again, slowly, to say where and why.
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
    """What reading a CSV file found."""

    rows: int
    dropped: int = 0
    """Rows that could not be read, where these are dropped."""
    faults: Sequence[str] = ()
    """A few of them: place and reason."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """How often each zone offset was written; empty where the table has no `zone_offset`."""

    def notes(self, cluster: str) -> tuple[Note, ...]:
        """What a person should know of it."""
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
                f"Times are written with several zone offsets, {listed}; each is taken at its word."
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
    """Create `table` as `select` over the CSV file, which the SELECT names `source`.

    A `Time` column T is a naive UTC TIMESTAMP in `source`. Beside it stands `zone_offset`, the offset that the row's
    times were written with, '' where they had none; a select that keeps it has it checked (a file where some times
    have an offset and others have none cannot be put on one clock). Empty fields are NULL, and so is NaN. A file
    compressed by gzip or Zstandard is known by its suffix.

    Args:
        connection: the database; its `TimeZone` is UTC.
        path: the file; its header must name exactly `columns`, in any order.
        columns: name and DuckDB type (VARCHAR, DOUBLE, BIGINT, INTEGER) of each column of the file, or its `Time`.
        select: `SELECT … FROM source`.
        table: name of the table made.
        delimiter: between fields.
        has_header: False: the file's columns are `columns`, in that order.

    Raises:
        BadTrace: with the line, the column and what was expected.
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
            said = str(error).partition("\n")[0]
            if "No space left" in said:  # for the table; nothing is wrong with the file
                raise
            next_step = "Look whether it is written to meanwhile, and whole."
            raise BadTrace(
                path, f"The file cannot be read: {said}.", next_step=next_step
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
    """How often each offset is in the table, most often first; empty where it keeps none."""
    kept = [row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall()]
    if "zone_offset" not in kept:
        return {}
    counted = connection.execute(
        f"SELECT zone_offset, count(*) FROM {table} WHERE zone_offset IS NOT NULL GROUP BY ALL ORDER BY 2 DESC, 1"
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
