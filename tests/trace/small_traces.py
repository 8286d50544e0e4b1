"""Make traces of a few rows, for the analyses of failures and of telemetry."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from holdfast.trace.clusters import Cluster
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading
from holdfast.trace.trace import Trace

SHARED_DATA = Path(__file__).parents[2] / "../shared/data"


def trace_of(
    scratch: Path,
    jobs: Sequence[Mapping[str, Any]],
    *,
    clusters: Sequence[Cluster] = (),
    compared: frozenset[str] = frozenset(),
    duration: str = "run",
) -> Trace:
    """Make a trace of these jobs, with every column that a job names."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    columns = [name for name in JOB_COLUMNS if any(name in job for job in jobs)] or [
        "cluster",
        "job_id",
    ]
    kinds = {name: JOB_COLUMNS[name] for name in columns}
    _fill(connection, "made", kinds, [[job.get(name) for name in columns] for job in jobs])
    known = {cluster.name: cluster for cluster in clusters}
    for name in dict.fromkeys(job["cluster"] for job in jobs):
        known.setdefault(name, Cluster(name=name, source="made"))
    reading = Reading(table="made", columns=frozenset(columns), clusters=tuple(known.values()))
    return Trace(connection, scratch, [reading], duration=duration, compared=compared)


def _fill(
    connection: Any, table: str, kinds: Mapping[str, str], rows: Sequence[Sequence[Any]]
) -> None:
    """Insert rows column by column: thousands per second, while `executemany` inserts a hundred."""
    columns = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
    if rows:
        cells = ", ".join(f"unnest(?::{kind}[])" for kind in kinds.values())
        connection.execute(
            f"INSERT INTO {table} SELECT {cells}",
            [list(column) for column in zip(*rows, strict=True)],
        )


def add(trace: Trace, table: str, columns: str, rows: Sequence[Sequence[Any]]) -> None:
    """Add rows to a table of telemetry; the trace adopts an aggregate (`metric_…`, `xid_onsets`)."""
    aggregate = table.startswith(("metric_", "xid_"))
    name = f"made_{table}" if aggregate else table
    kinds = dict(column.split(" ") for column in columns.split(", "))
    _fill(trace.connection, name, kinds, rows)
    if aggregate:
        trace.adopt(table, f"SELECT * FROM {name}")
    trace.metrics |= {row[1] for row in rows} if "metric VARCHAR" in columns else {"XID_ERRORS"}


def add_values(
    trace: Trace, cluster: str, metric: str, values: Sequence[float], counts: Sequence[int] = ()
) -> None:
    """Add value counts of a metric."""
    rows = [
        (cluster, metric, value, n)
        for value, n in zip(values, counts or [1] * len(values), strict=True)
    ]
    add(trace, "metric_values", "cluster VARCHAR, metric VARCHAR, value DOUBLE, n BIGINT", rows)


def add_hours(trace: Trace, rows: Sequence[tuple[str, str, str, int, float, int]]) -> None:
    """Add rows (cluster, metric, hour, n, sum_value, n_zero)."""
    columns = (
        "cluster VARCHAR, metric VARCHAR, hour TIMESTAMP, n BIGINT, sum_value DOUBLE, n_zero BIGINT"
    )
    add(trace, "metric_hours", columns, rows)


def add_measured_devices(trace: Trace, rows: Sequence[tuple[str, str, str]]) -> None:
    """Add rows (cluster, metric, device's name) of the aggregate `metric_devices`."""
    add(trace, "metric_devices", "cluster VARCHAR, metric VARCHAR, device VARCHAR", rows)


def add_onsets(trace: Trace, rows: Sequence[tuple[str, int, Any, int]]) -> None:
    """Add rows (cluster, device, at, code)."""
    add(trace, "xid_onsets", 'cluster VARCHAR, device INTEGER, "at" TIMESTAMP, code INTEGER', rows)


def add_devices(trace: Trace, rows: Sequence[tuple[str, int, str, str, int | None]]) -> None:
    """Add rows (cluster, device, name, node, gpu)."""
    add(
        trace,
        "devices",
        "cluster VARCHAR, device INTEGER, name VARCHAR, node VARCHAR, gpu INTEGER",
        rows,
    )


def add_samples(trace: Trace, rows: Sequence[tuple[str, str, str, int, float]]) -> None:
    """Add rows (cluster, metric, at, device, value)."""
    add(
        trace,
        "samples",
        'cluster VARCHAR, metric VARCHAR, "at" TIMESTAMP, device INTEGER, value FLOAT',
        rows,
    )
