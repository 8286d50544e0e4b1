"""Stream the rows of a parser that is written in Python into a table of the database."""

import csv
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.sources.sql import literal, scratch_folder

if TYPE_CHECKING:
    import duckdb

__all__ = ["literal", "read_rows"]

BATCH_ROWS: Final = 100_000
"""Number of rows that are written to disk before the database reads them.

The limit bounds the disk space that is used.
"""
NULL: Final = "\x1bNULL"
SEPARATOR: Final = "\x1f"
"""Separator of list items: ASCII's unit separator, which occurs in no name."""
LONGEST_ROW_BYTES: Final = 32 << 20


def read_rows(
    connection: "duckdb.DuckDBPyConnection",
    table: str,
    columns: Mapping[str, str],
    rows: Iterable[Sequence[Any]],
) -> int:
    """Create `table` from rows in bounded memory.

    The speed is about 200,000 rows of a dozen columns per second.

    Args:
        connection: the database; its `TimeZone` is UTC.
        table: name of the new table, which is created even if there are no rows.
        columns: name and DuckDB type of each column, in the order of the cells: VARCHAR, VARCHAR[],
            TIMESTAMP or any number.
        rows: the cells of each row, in that order. None is NULL and '' is an empty text. A
            TIMESTAMP is given in seconds since the Unix epoch, or as a `datetime` in UTC without a
            zone. A VARCHAR[] is given as a sequence of texts. If the iterator raises an exception,
            the table is dropped and the exception is raised again.

    Returns:
        The number of rows.
    """
    definition = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    connection.execute(f"CREATE OR REPLACE TABLE {table} ({definition})")
    source = iter(rows)
    count = 0
    try:
        with tempfile.TemporaryDirectory(dir=scratch_folder(connection), prefix="rows-") as folder:
            batch = Path(folder) / "batch.csv"
            insert = f"INSERT INTO {table} {_select(batch, columns)}"
            lists = [number for number, kind in enumerate(columns.values()) if kind.endswith("[]")]
            while written := _write(batch, islice(source, BATCH_ROWS), lists):
                connection.execute(insert)
                count += written
    except BaseException:
        connection.execute(f"DROP TABLE IF EXISTS {table}")
        raise
    return count


def _write(batch: Path, rows: Iterator[Sequence[Any]], lists: Sequence[int]) -> int:
    count = 0
    # Half a surrogate pair, which UTF-8 cannot encode, is replaced; the rest of the text is kept.
    with batch.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        for row in rows:
            cells = [NULL if cell is None else cell for cell in row]
            for number in lists:
                if row[number] is not None:
                    cells[number] = SEPARATOR.join(row[number])
            writer.writerow(cells)
            count += 1
    return count


def _select(batch: Path, columns: Mapping[str, str]) -> str:
    read = {}
    cells = []
    for name, kind in columns.items():
        read[name] = kind
        cell = f'"{name}"'
        if kind == "TIMESTAMP":
            read[name] = "VARCHAR"
            # A cast by way of TIMESTAMPTZ applies an offset, which a cast to TIMESTAMP ignores.
            cell = (
                f"coalesce(make_timestamp(round(try_cast({cell} AS DOUBLE) * 1e6)::BIGINT),"
                f" timezone('UTC', {cell}::TIMESTAMPTZ))"
            )
        elif kind.endswith("[]"):
            read[name] = "VARCHAR"
            cell = f"CASE WHEN {cell} = '' THEN [] ELSE string_split({cell}, '{SEPARATOR}') END"
        cells.append(cell)
    schema = ", ".join(f"{literal(name)}: '{kind}'" for name, kind in read.items())
    return (
        f"SELECT {', '.join(cells)} FROM read_csv({literal(batch)}, auto_detect=false, "
        "header=false, delim=',', "
        f"quote='\"', escape='\"', nullstr='{NULL}', new_line='\\n', "
        f"max_line_size={LONGEST_ROW_BYTES}, columns={{{schema}}})"
    )
