"""Hold a metric's aggregates as tables, which `attach` adds to a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from holdfast.trace import aggregates
from holdfast.trace.distribution import Distribution
from holdfast.trace.notes import Note
from holdfast.trace.schema import DEVICE_COLUMNS
from holdfast.trace.telemetry.checks import notes_of
from holdfast.trace.telemetry.metrics import METRICS, Device, Metric, device_named
from holdfast.trace.telemetry.scan import Scan

if TYPE_CHECKING:
    import duckdb

AGGREGATES: Final = {
    "metric_values": {"metric": "VARCHAR", "value": "DOUBLE", "n": "BIGINT"},
    "metric_hours": {
        "metric": "VARCHAR", "hour": "TIMESTAMP", "n": "BIGINT", "sum_value": "DOUBLE", "n_zero": "BIGINT",
    },
    "metric_devices": {
        "metric": "VARCHAR", "device": "VARCHAR", "n": "BIGINT", "sum_value": "DOUBLE", "n_zero": "BIGINT",
        "min_value": "DOUBLE", "max_value": "DOUBLE",
    },
    "xid_onsets": {"device": "INTEGER", "at": "TIMESTAMP", "code": "INTEGER"},
}  # fmt: skip
"""Aggregates of telemetry, with the types of the columns that follow `cluster`."""

Columns = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The aggregates of the samples of a metric from one source."""

    metric: Metric
    devices: Sequence[Device]
    tables: dict[str, Columns]
    """NumPy columns of each of `AGGREGATES`; `xid_onsets.device` is an index of `devices`."""
    notes: tuple[Note, ...] = ()

    @property
    def distribution(self) -> Distribution:
        """Return the distribution over all samples."""
        values = self.tables["metric_values"]
        return Distribution.of(values["value"], values["n"])


def summary_of_scan(scan: Scan, cluster: str) -> Summary:
    """Convert a scan of a wide file to a summary."""
    assert scan.totals is not None, "the pass was for values only"
    metric, totals = scan.metric, scan.totals
    devices = [device_named(name, metric) for name in scan.wide.devices]
    values, counts = scan.counts.result()
    seen = np.flatnonzero(totals.n)
    hours = sorted(totals.hours)
    rows = [totals.hours[hour] for hour in hours]
    onsets = scan.xid_onsets
    tables: dict[str, Columns] = {
        "metric_values": {"value": values, "n": counts},
        "metric_hours": {
            "hour": np.array(hours, dtype="datetime64[h]").astype("datetime64[us]"),
            "n": np.array([row[0] for row in rows], dtype=np.int64),
            "sum_value": np.array([row[1] for row in rows], dtype=float),
            "n_zero": np.array([row[2] for row in rows], dtype=np.int64),
        },
        "metric_devices": {
            "device": np.array([devices[index].name for index in seen], dtype=object),
            "n": totals.n[seen],
            "sum_value": totals.sum[seen],
            "n_zero": totals.n_zero[seen],
            "min_value": totals.min[seen],
            "max_value": totals.max[seen],
        },
        "xid_onsets": {
            "device": np.array([onset.device for onset in onsets], dtype=np.int32),
            "at": np.array([onset.at_us for onset in onsets], dtype="datetime64[us]"),
            "code": np.array([onset.code for onset in onsets], dtype=np.int32),
        },
    }
    return Summary(
        metric=metric, devices=devices, tables=tables, notes=tuple(notes_of(scan, cluster))
    )


def insert(
    connection: "duckdb.DuckDBPyConnection", table: str, columns: Columns, fixed: dict[str, object]
) -> None:
    """Append NumPy columns to a table that has the same column names.

    Every row also gets the values in `fixed`.
    """
    if not len(next(iter(columns.values()))):
        return
    names = ", ".join(f'"{name}"' for name in [*fixed, *columns])
    values = ", ".join(["?"] * len(fixed) + [f'arriving."{name}"' for name in columns])
    connection.register("arriving", columns)
    try:
        connection.execute(
            f"INSERT INTO {table} ({names}) SELECT {values} FROM arriving", list(fixed.values())
        )
    finally:
        connection.unregister("arriving")


def create_tables(connection: "duckdb.DuckDBPyConnection") -> None:
    """Create the missing ones of `devices`, `metrics`, and `telemetry_NAME` for each aggregate."""
    for name, types in AGGREGATES.items():
        _create(connection, f"telemetry_{name}", {"cluster": "VARCHAR", **types})
    _create(connection, "devices", DEVICE_COLUMNS)
    _create(connection, "telemetry_rows", {"rows": "VARCHAR"})
    _create(connection, "metrics", {"metric": "VARCHAR", "unit": "VARCHAR", "decimals": "INTEGER"})
    if connection.execute("SELECT count(*) FROM metrics").fetchall() == [(0,)]:
        rows = [[metric.name, metric.unit, metric.decimals] for metric in METRICS.values()]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)


def _create(
    connection: "duckdb.DuckDBPyConnection", table: str, columns: Mapping[str, str]
) -> None:
    typed = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
    connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({typed})")


def summary_of_rows(
    connection: "duckdb.DuckDBPyConnection",
    metric: Metric,
    rows: str,
    devices: Sequence[Device],
    notes: Sequence[Note],
) -> Summary:
    """Compute the aggregates of samples in a database, with the SQL of `holdfast.trace.aggregates`.

    Args:
        connection: the database.
        metric: the metric of all rows.
        rows: a SELECT of at, device (an index of `devices`) and value (FLOAT, in the metric's
            unit).
        devices: the devices of the rows.
        notes: the notes made about the rows so far.
    """
    columns = {
        "device": np.arange(len(devices), dtype=np.int32),
        "name": np.array([device.name for device in devices], dtype=object),
    }
    connection.register("arriving", columns)
    given = (
        f"samples AS (SELECT '' AS cluster, '{metric.name}' AS metric, * FROM ({rows})), "
        "devices AS (SELECT '' AS cluster, * FROM arriving), "
        f"metrics AS (SELECT '{metric.name}' AS metric, {metric.decimals} AS decimals)"
    )
    try:
        tables = {}
        for name, types in AGGREGATES.items():
            kept = ", ".join(
                f'"{column}"::{kind} AS "{column}"'
                for column, kind in types.items()
                if column != "metric"
            )
            tables[name] = connection.execute(
                f"WITH {given} SELECT {kept} FROM ({aggregates.sql(name)})"
            ).fetchnumpy()
    finally:
        connection.unregister("arriving")
    return Summary(metric=metric, devices=devices, tables=tables, notes=tuple(notes))


def quoted(text: str) -> str:
    """Quote a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
