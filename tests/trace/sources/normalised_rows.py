"""Read a file with an adapter, for tests: the reading, and the rows of its table as dictionaries."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading, Source


def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def read_file(source: Source, path: Path, **variables: str) -> tuple[Reading, list[dict[str, Any]]]:
    with database() as connection:
        for name, value in variables.items():
            connection.execute(f"SET VARIABLE {name} = '{value}'")
        reading = source.read(connection, path, "jobs_0")
        return reading, rows_of(connection, reading)


def rows_of(connection: duckdb.DuckDBPyConnection, reading: Reading) -> list[dict[str, Any]]:
    kinds = {row[0]: row[1] for row in connection.execute(f"DESCRIBE {reading.table}").fetchall()}
    assert set(kinds) == reading.columns
    assert kinds == {name: JOB_COLUMNS[name] for name in kinds}
    rows = connection.execute(f"SELECT * FROM {reading.table} ORDER BY job_id, attempt").fetchall()
    return [dict(zip(kinds, row, strict=True)) for row in rows]


def notes_of(reading: Reading) -> dict[str, int]:
    return {note.check: note.rows for note in reading.notes}


def unix_s(at: datetime | None) -> float | None:
    return None if at is None else at.replace(tzinfo=UTC).timestamp()
