"""Read a store that `holdfast.trace.store` wrote, a folder with jobs.parquet and manifest.json."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.manifest import is_folder_of, read_manifest
from holdfast.trace.sources.reading import Reading, Source, wanted
from holdfast.trace.sources.sql import literal, openable

if TYPE_CHECKING:
    import duckdb

JOBS_FILE: Final = "jobs.parquet"


def is_store(path: Path) -> bool:
    """Return True if the path is a folder that contains a store."""
    return is_folder_of(path, "store")


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    import duckdb

    manifest = read_manifest(path, "store")
    columns = frozenset[str]().union(*(held.columns for held in manifest.clusters))
    listed = ", ".join(f'"{name}"' for name in sorted(columns))
    file = path / JOBS_FILE
    condition = wanted(connection) if "submit_at" in columns else ""
    try:
        with openable(connection, file) as opened:
            jobs = (
                f"SELECT {listed} FROM read_parquet({literal(opened)}, hive_partitioning = false) "
                f"WHERE {condition or 'true'}"
            )
            connection.execute(f"CREATE OR REPLACE TABLE {table} AS {jobs}")
    except duckdb.Error as error:
        raise BadTrace(
            file, f"It cannot be read: {error}.", next_step="Write the store again."
        ) from error
    rows = connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]
    expected = sum(held.rows for held in manifest.clusters)
    if not condition and rows != expected:
        raise BadTrace(
            file,
            f"It holds {rows} rows, its manifest has {expected}.",
            next_step="Write the store again.",
        )
    return Reading(
        table=table,
        columns=columns,
        clusters=tuple(held.cluster for held in manifest.clusters),
        notes=manifest.notes,
        lacking={held.cluster.name: columns - held.columns for held in manifest.clusters},
    )


SOURCE: Final = Source(
    name="store",
    title="a folder that holdfast trace convert wrote",
    recognises=is_store,
    read=_read,
)
