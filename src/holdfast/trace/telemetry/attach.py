"""Add telemetry from files, a store or a Prometheus server to a trace, as aggregates."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.trace import aggregates
from holdfast.trace.distribution import Distribution
from holdfast.trace.telemetry.checks import empty_note
from holdfast.trace.telemetry.dictionary import Ids
from holdfast.trace.telemetry.inputs import Given, telemetry_in
from holdfast.trace.telemetry.long import open_long, summary_of_long
from holdfast.trace.telemetry.metrics import Metric, metric_named
from holdfast.trace.telemetry.progress import BytesRead, Progress
from holdfast.trace.telemetry.prometheus import Span, fetch
from holdfast.trace.telemetry.prometheus_http import Prometheus
from holdfast.trace.telemetry.scan import scan_wide
from holdfast.trace.telemetry.store import Store, open_database
from holdfast.trace.telemetry.summary import (
    AGGREGATES,
    Summary,
    create_tables,
    insert,
    quoted,
    summary_of_scan,
)

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.trace import Trace


def value_counts(path: Path | str, metric: str | None = None) -> Distribution:
    """Return the exact distribution of all values in a telemetry file, store or folder.

    The source is read once, in bounded memory.

    Args:
        path: a wide CSV, a long Parquet, or a converted store.
        metric: a name in `metrics.METRICS`, or the name in an exporter. If None, the file's name
            gives the metric.

    Raises:
        BadUse: the metric is unknown, or there are several metrics.
        BadTrace: the file cannot be read; the message has the place.
    """
    found: dict[str, list[Distribution]] = {}
    for given in telemetry_in(Path(path), metric=metric):
        for one, distribution in _distributions(given, metric):
            found.setdefault(one.name, []).append(distribution)
    if not found:
        raise BadUse(f"{path} has no {metric or 'telemetry'}. Ask for a metric that it has.")
    if len(found) > 1:
        raise BadUse(f"{path} holds {', '.join(found)}. Say which metric is meant with metric=.")
    (parts,) = found.values()
    return Distribution.of(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def _distributions(given: Given, metric: str | None) -> Iterator[tuple[Metric, Distribution]]:
    if given.form == "wide":
        assert given.metric is not None
        scan = scan_wide(given.path, given.metric, factor=given.factor, values_only=True)
        yield given.metric, Distribution.of(*scan.counts.result())
        return
    with open_database() as connection:
        for summary, _ in _summaries(connection, given, "", metric):
            yield summary.metric, summary.distribution


def attach(
    trace: "Trace",
    where: Path | str,
    *,
    cluster: str,
    metric: str | None = None,
    columns: Mapping[str, str] | None = None,
    span: Span | None = None,
    folder: Path | str | None = None,
    progress: Progress | None = None,
) -> None:
    """Add a cluster's telemetry to a trace.

    The trace gets the aggregates `metric_*` and `xid_onsets`, and the table `devices`. Long Parquet
    files and converted stores also add the view `samples`, for SQL queries.

    Args:
        trace: the trace; metrics and notes are added to its `metrics` and `notes`.
        where: a file, a folder of files, a converted store, or the URL of a Prometheus server.
        cluster: name of the cluster.
        metric: for a file, its metric if its name does not give one. For a folder or a server, the
            only metric to read.
        columns: names of the columns in a long Parquet file; see `long.NAMES`.
        span: the time span to fetch from a Prometheus server.
        folder: the store for fetched samples; samples that it already has are not fetched again.
        progress: called with the amount read and the total.

    Raises:
        BadUse: there is no telemetry, or a server refuses the request.
        BadTrace: a file cannot be read; the message has the place.
        PrometheusError: a server does not answer; samples fetched so far stay in `folder`.
    """
    if str(where).startswith(("http://", "https://")):
        if span is None or folder is None:
            raise BadUse(
                "A Prometheus was given without a time or a folder. Give a span and a folder to fetch it into."
            )
        server = Prometheus(str(where), waiting=_says(progress) if progress else None)
        where = fetch(
            server, folder, span, metrics=[metric] if metric else None, progress=progress
        ).folder
    found = telemetry_in(Path(where), metric=metric)
    read = BytesRead(progress, [given.path for given in found if given.form == "wide"])
    for given in found:
        if given.form == "wide":
            assert given.metric is not None
            scan = scan_wide(
                given.path, given.metric, factor=given.factor, progress=read.of(given.path)
            )
            adopt(trace, summary_of_scan(scan, cluster), cluster)
        else:
            if given.form == "store" and not Store.open(given.path).metrics():
                trace.notes.append(empty_note(given.path.name, cluster))
            for summary, rows in _summaries(trace.connection, given, cluster, metric, columns):
                ids = adopt(trace, summary, cluster)
                _add_to_view(trace, summary.metric, rows, ids, cluster)
            trace.folders.append(given.path if given.path.is_dir() else given.path.parent)


def _says(progress: Progress) -> Callable[[str], None]:
    return lambda what: progress(what, 0, None)


def _summaries(
    connection: "duckdb.DuckDBPyConnection",
    given: Given,
    cluster: str,
    metric: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[tuple[Summary, str]]:
    """Yield the summary of each metric in a long source or a store, with SQL of its rows.

    If `metric` is given, yield only that metric.
    """
    if given.form == "store":
        store = Store.open(given.path)
        wanted = metric_named(metric) if metric else None
        for one in store.metrics():
            if wanted is None or one is wanted[0]:
                yield store.summary(connection, one), store.samples_sql(one)
    else:
        for source in open_long(connection, given, columns):
            yield summary_of_long(connection, source, cluster)


def _add_to_view(trace: "Trace", metric: Metric, rows: str, ids: Ids, cluster: str) -> None:
    """Add rows to the view `samples`.

    `ids` has, for each device number in the rows, the device's id in the trace.
    """
    connection = trace.connection
    (number,) = connection.execute("SELECT count(*) FROM telemetry_rows").fetchall()[0]
    table = f"telemetry_ids_{number}"
    connection.execute(f"CREATE TABLE {table} (device INTEGER, own INTEGER)")
    insert(
        connection,
        table,
        {"device": ids.astype(np.int32), "own": np.arange(len(ids), dtype=np.int32)},
        {},
    )
    select = (
        f"SELECT {quoted(cluster)} AS cluster, '{metric.name}' AS metric, r.\"at\", i.device, r.value "
        f"FROM ({rows}) r JOIN {table} i ON r.device = i.own"
    )
    connection.execute("INSERT INTO telemetry_rows VALUES (?)", [select])
    parts = [part for (part,) in connection.execute("SELECT rows FROM telemetry_rows").fetchall()]
    connection.execute(f"CREATE OR REPLACE VIEW samples AS {' UNION ALL '.join(parts)}")


def adopt(trace: "Trace", summary: Summary, cluster: str) -> Ids:
    """Add a metric's aggregates to the trace.

    Returns:
        For each device of the summary, its id in the trace's table `devices`.
    """
    connection = trace.connection
    create_tables(connection)
    ids = _with_ids(connection, summary, cluster)
    for name, columns in summary.tables.items():
        if name == "xid_onsets":
            columns = {**columns, "device": ids[columns["device"]]}  # noqa: PLW2901 - the trace's ids for the file's
            insert(connection, "telemetry_xid_onsets", columns, {"cluster": cluster})
        else:
            insert(
                connection,
                f"telemetry_{name}",
                columns,
                {"cluster": cluster, "metric": summary.metric.name},
            )
        trace.adopt(name, aggregates.merge_sql(["cluster", *AGGREGATES[name]], f"telemetry_{name}"))
    trace.metrics |= {summary.metric.name}
    trace.notes += (replace(note, cluster=cluster) for note in summary.notes)
    return ids


def _with_ids(connection: "duckdb.DuckDBPyConnection", summary: Summary, cluster: str) -> Ids:
    """Return the ids of a summary's devices in the table `devices`; missing devices are added."""
    known = dict(
        connection.execute(
            "SELECT name, device FROM devices WHERE cluster = ?", [cluster]
        ).fetchall()
    )
    (following,) = connection.execute(
        "SELECT coalesce(max(device) + 1, 0) FROM devices"
    ).fetchall()[0]
    new = [device for device in dict.fromkeys(summary.devices) if device.name not in known]
    known |= {device.name: following + index for index, device in enumerate(new)}
    columns = {
        "device": np.array([known[device.name] for device in new], dtype=np.int32),
        "name": np.array([device.name for device in new], dtype=object),
        "node": np.array([device.node for device in new], dtype=object),
        "gpu": np.ma.masked_equal(
            [-1 if device.gpu is None else device.gpu for device in new], -1
        ).astype(np.int32),
    }
    insert(connection, "devices", columns, {"cluster": cluster})
    return np.array([known[device.name] for device in summary.devices], dtype=np.int64)
