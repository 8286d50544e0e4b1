"""Write traces to disk: jobs as Parquet, so that later runs load faster, and partial results.

    STORE/jobs.parquet         the jobs, with the columns of `schema.JOB_COLUMNS` that any cluster has
    STORE/manifest.json        describes the store; telemetry may lie beside (`holdfast.trace.telemetry`)
    PARTIAL/agg_NAME.parquet   an aggregate of a part of the jobs
    PARTIAL/manifest.json

Workers write partial results, which are then merged. The manifest is written last, and only a
folder with a manifest is a store. A conversion that is killed before that leaves no store, and the
next conversion into the folder overwrites the remains. A complete store is never overwritten.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.core.atomic import replacing
from holdfast.core.errors import BadUse
from holdfast.trace import aggregates
from holdfast.trace.clusters import known_first
from holdfast.trace.manifest import FILE, Held, Manifest, read_manifest, write_manifest
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading
from holdfast.trace.sources.sql import literal, quoted
from holdfast.trace.sources.stored import JOBS_FILE, is_store
from holdfast.trace.trace import Trace, open_scratch

if TYPE_CHECKING:
    import duckdb

TELEMETRY: Final = ("telemetry.json", "devices.parquet", "samples")
"""Files in a store's folder that may exist before the jobs are written."""


def convert(
    trace: Trace,
    folder: Path,
    *,
    progress: Callable[[str, float, float | None], None] | None = None,
) -> None:
    """Write the jobs of a trace as a store that `load` can read, atomically.

    Args:
        trace: the trace; its notes are written too.
        folder: a new folder, an empty folder, or one that holds only telemetry.
        progress: called before and after, with a description, done and total.

    Raises:
        BadUse: the folder already holds a store or other files.
    """
    if is_store(folder):
        raise BadUse(f"{folder} holds a store already. Give a new folder, or remove it first.")
    if folder.is_file():
        raise BadUse(f"{folder} is a file. Give a new folder.")
    others = sorted(
        path.name for path in folder.glob("[!.]*") if path.name not in {*TELEMETRY, JOBS_FILE}
    )
    if others:
        raise BadUse(f"{folder} holds other things, such as {others[0]}. Give a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{JOBS_FILE}.*.tmp"):
        left.unlink()
    columns = [name for name in JOB_COLUMNS if trace.has(name)]
    rows = dict(
        trace.connection.execute("SELECT cluster, count(*) FROM jobs GROUP BY ALL").fetchall()
    )
    total = float(sum(rows.values()))
    if progress:
        progress("Writing jobs", 0.0, total)
    listed = ", ".join(f'"{name}"' for name in columns)
    _write_parquet(trace.connection, f"SELECT {listed} FROM jobs", folder / JOBS_FILE)
    write_manifest(folder, _manifest(trace, "store", rows))
    if progress:
        progress("Writing jobs", total, total)


def write_partials(trace: Trace, folder: Path, names: Iterable[str]) -> None:
    """Write aggregates of a trace that contains only a part of the jobs, for `merge_partials`.

    Args:
        trace: a trace of some of the files or months. An event that spans two parts is lost, as the
            SQL file of each aggregate describes.
        folder: created if it does not exist; existing partial results are overwritten.
        names: names of aggregates in `holdfast.trace.aggregates`.

    Raises:
        LeftOut: the trace lacks the input of an aggregate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    names = tuple(names)
    for name in names:
        _write_parquet(
            trace.connection, f"FROM {trace.prepare(name)}", folder / f"agg_{name}.parquet"
        )
    write_manifest(folder, replace(_manifest(trace, "partial", {}), aggregates=names))


def merge_partials(folders: Sequence[Path], *, memory_limit_mb: int = 700) -> Trace:
    """Merge partial results to a trace that has no single jobs.

    The trace has every aggregate that all parts have.

    Args:
        folders: folders that `write_partials` wrote; no job may be in two of them.
        memory_limit_mb: memory limit of the database in MB.

    Raises:
        BadTrace: a folder holds no partial results.
        BadUse: `folders` is empty, or the parts define durations differently.
    """
    manifests = [read_manifest(folder, "partial") for folder in folders]
    if not manifests:
        raise BadUse("There are no partial results to merge. Give at least one folder of them.")
    if len({manifest.duration for manifest in manifests}) > 1:
        raise BadUse(
            "Some partial results count released durations and some run times. Make all with the same option."
        )
    compared = frozenset(
        held.cluster.name for manifest in manifests for held in manifest.clusters if held.compared
    )
    shared = set(manifests[0].aggregates).intersection(
        *(manifest.aggregates for manifest in manifests)
    )
    readings = _merged_readings(manifests)
    connection, scratch = open_scratch(memory_limit_mb=memory_limit_mb)
    trace = Trace(
        connection,
        scratch,
        readings,
        duration=manifests[0].duration,
        compared=compared,
        has_jobs=False,
    )
    trace.metrics = frozenset[str]().union(*(manifest.metrics for manifest in manifests))
    try:
        for name in sorted(shared):
            files = ", ".join(literal(folder / f"agg_{name}.parquet") for folder in folders)
            source = f"read_parquet([{files}], hive_partitioning = false)"
            kinds = {
                row[0]: row[1] for row in connection.execute(f"DESCRIBE FROM {source}").fetchall()
            }
            # The type of a sum of counts is wider than the type of a count.
            cells = ", ".join(
                f"{quoted(column)}::{kind} AS {quoted(column)}" for column, kind in kinds.items()
            )
            trace.adopt(name, f"SELECT {cells} FROM ({aggregates.merge_sql(list(kinds), source)})")
    except BaseException:
        trace.close()
        raise
    return trace


def _manifest(trace: Trace, kind: str, rows: dict[str, int]) -> Manifest:
    return Manifest(
        kind=kind,
        duration=trace.duration,
        clusters=tuple(
            Held(
                cluster=cluster,
                compared=name in trace.compared,
                columns=trace.columns[name],
                rows=rows.get(name, 0),
            )
            for name, cluster in trace.clusters.items()
        ),
        notes=tuple(trace.notes),
        metrics=trace.metrics,
    )


def _merged_readings(manifests: Sequence[Manifest]) -> list[Reading]:
    """Return one reading per cluster, without a table of jobs."""
    merged: dict[str, Held] = {}
    for held in (held for manifest in manifests for held in manifest.clusters):
        name = held.cluster.name
        if name in merged:
            cluster = known_first(merged[name].cluster, held.cluster)
            held = replace(held, cluster=cluster, columns=merged[name].columns | held.columns)  # noqa: PLW2901
        merged[name] = held
    notes = [note for manifest in manifests for note in manifest.notes]
    return [
        Reading(
            table="",
            columns=held.columns,
            clusters=(held.cluster,),
            notes=tuple(note for note in notes if note.cluster == name),
        )
        for name, held in merged.items()
    ]


def _write_parquet(connection: "duckdb.DuckDBPyConnection", sql: str, path: Path) -> None:
    """Write the result of a query to a Parquet file atomically."""
    with replacing(path) as temporary:
        connection.execute(
            f"COPY ({sql}) TO {literal(temporary)} (FORMAT parquet, COMPRESSION zstd)"
        )
