"""Telemetry for a trace: from files, a store or a Prometheus to the aggregates that the analyses read."""

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
    """The exact distribution of all values of a telemetry file, store or folder, in one pass and bounded memory.

    Args:
        path: a wide CSV, a long Parquet, or a converted store.
        metric: a name of `metrics.METRICS`, or an exporter's; None: the file's name tells.

    Raises:
        BadUse: the metric is not known, or there are several.
        BadTrace: the file is not readable; says where.
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
    """Give a trace the telemetry of a cluster: its aggregates `metric_*` and `xid_onsets`, and the table `devices`.

    Long Parquet and converted stores also give the view `samples`, for questions in SQL.

    Args:
        trace: whose database takes the tables; its `metrics` and `notes` grow.
        where: a file or a folder of them, a converted store, or the URL of a Prometheus.
        cluster: whose telemetry it is.
        metric: what a file is of whose name does not tell; of a folder or a server, the only one that is wanted.
        columns: of a long Parquet file, what its columns are called: see `long.NAMES`.
        span: which time to fetch from a Prometheus.
        folder: the store to fetch it into; what is there is not fetched again.
        progress: told how much is read of how much.

    Raises:
        BadUse: there is no telemetry there, or a server refuses.
        BadTrace: a file is not readable; says where.
        PrometheusError: a server does not answer; what was fetched is kept in `folder`.
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
    """The metrics of a long source or a store, or the one that is wanted, each with the SELECT of its rows."""
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
    """Let the view `samples` show these rows too; `ids` are the trace's ids of the rows' devices."""
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
    """Add a metric's aggregates to those that the trace has; the same metric of the same cluster adds up.

    Answers the ids, in the table `devices`, of the summary's devices.
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
    """The ids of a summary's devices in the table `devices`, which gets those that it lacks."""
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
