"""Convert telemetry files to a store: read each file once, and compute the aggregates meanwhile."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.trace import aggregates
from holdfast.trace.telemetry.inputs import Given, telemetry_in
from holdfast.trace.telemetry.long import LongSource, open_long, summary_of_long
from holdfast.trace.telemetry.metrics import METRICS, Metric, device_named
from holdfast.trace.telemetry.progress import BytesRead, Progress
from holdfast.trace.telemetry.scan import scan_wide
from holdfast.trace.telemetry.store import MetricWriter, PartWriter, Store, open_database
from holdfast.trace.telemetry.summary import AGGREGATES, Columns, Summary, summary_of_scan
from holdfast.trace.telemetry.wide_csv import WideFile

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.telemetry.dictionary import Ids


def convert(
    where: Path | str,
    folder: Path | str,
    *,
    metric: str | None = None,
    columns: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Store:
    """Convert the telemetry in a file or a folder to a store.

    Metrics that the store already has stay unchanged. If the process is killed, every metric is
    either complete or absent, and a second conversion continues with the next metric.

    Args:
        where: a file, or a folder of files.
        folder: the store; created if it does not exist.
        metric: the metric of a file whose name does not give one.
        columns: names of the columns in a long Parquet file; see `long.NAMES`.
        progress: called with the amount read and the total.

    Raises:
        BadUse: there is no telemetry, the folder is not a store, or it has the metric from other
            files.
        BadTrace: a file cannot be read; the message has the place.
    """
    given = telemetry_in(Path(where), metric=metric)
    store = Store.create(Path(folder))
    read = BytesRead(progress, [one.path for one in given if one.form == "wide"])
    with open_database() as connection:
        found: dict[str, list[Given | LongSource]] = {}
        for one in given:
            if one.form == "store":
                raise BadUse(f"{one.path} is a converted store already. Attach it as it is.")
            for source in [one] if one.form == "wide" else open_long(connection, one, columns):
                assert source.metric is not None
                found.setdefault(source.metric.name, []).append(source)
        for name in sorted(found, key=list(METRICS).index):
            _convert_metric(store, METRICS[name], found[name], connection, read)
    return store


def _convert_metric(
    store: Store,
    metric: Metric,
    files: Sequence[Given | LongSource],
    connection: "duckdb.DuckDBPyConnection",
    read: BytesRead,
) -> None:
    sources = [_identity(one.path) for one in files]
    if there := store.manifest(metric):
        if there["sources"] != sources:
            raise BadUse(
                f"{store.folder} holds {metric.name} from other files, or they have changed. "
                f"Convert into a new folder, or remove {store.place(metric)} first."
            )
        return
    writer = MetricWriter(store, metric, connection)
    try:
        summaries = [
            _convert_wide(writer, one, connection, read)
            if isinstance(one, Given)
            else _convert_long(writer, one, connection)
            for one in files
        ]
        tables = {name: _merged(name, summaries, connection) for name in AGGREGATES}
        notes = [note for summary in summaries for note in summary.notes]
        writer.finish(tables, sources, notes)
    except BaseException:
        writer.abandon()
        raise


class _WideConversion:
    """Write the blocks of a wide file to the parts of a store."""

    def __init__(self, writer: MetricWriter, connection: "duckdb.DuckDBPyConnection") -> None:
        self.ids: Ids = np.empty(0, dtype=np.int64)
        self.parts: list[PartWriter] = []
        self._writer, self._connection = writer, connection
        writer.begin_source()

    def begin(self, wide: WideFile) -> None:
        self._writer.restart_source()
        self.parts = []
        devices = [device_named(name, self._writer.metric) for name in wide.devices]
        self.ids = self._writer.store.with_devices(self._connection, devices)

    def thread(self) -> PartWriter:
        self.parts.append(self._writer.part_writer(self.ids))
        return self.parts[-1]


def _convert_wide(
    writer: MetricWriter, given: Given, connection: "duckdb.DuckDBPyConnection", read: BytesRead
) -> Summary:
    """Write the samples of a wide file to the store's parts.

    Returns:
        The summary of the file, with the store's device ids.
    """
    conversion = _WideConversion(writer, connection)
    scan = scan_wide(
        given.path,
        writer.metric,
        factor=given.factor,
        watcher=conversion,
        progress=read.of(given.path),
    )
    for part in conversion.parts:
        part.flush()
    summary = summary_of_scan(scan, "")
    onsets = summary.tables["xid_onsets"]
    onsets["device"] = conversion.ids[onsets["device"]]
    return summary


def _convert_long(
    writer: MetricWriter, source: LongSource, connection: "duckdb.DuckDBPyConnection"
) -> Summary:
    summary, rows = summary_of_long(connection, source, "")
    ids = writer.store.with_devices(connection, summary.devices)
    writer.begin_source()
    writer.write_rows(rows, ids)
    onsets = summary.tables["xid_onsets"]
    onsets["device"] = ids[onsets["device"]]
    return summary


def _merged(
    name: str, summaries: list[Summary], connection: "duckdb.DuckDBPyConnection"
) -> Columns:
    """Merge the tables of one aggregate from several files."""
    columns = {
        key: np.concatenate([one.tables[name][key] for one in summaries])
        for key in summaries[0].tables[name]
    }
    if len(summaries) == 1:
        return columns
    connection.register("arriving", columns)
    merged: Columns = connection.execute(
        aggregates.merge_sql(list(columns), "arriving")
    ).fetchnumpy()
    connection.unregister("arriving")
    return merged


def _identity(path: Path) -> dict[str, Any]:
    """Return name, size and modification time of a source file, to detect later changes."""
    stat = path.stat()
    return {"name": path.name, "size_bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
