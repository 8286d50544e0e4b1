"""Define the converted store: long Parquet by metric and day, with the aggregates of every metric.

    FOLDER/telemetry.json                                       marks the folder as a store
    FOLDER/devices.parquet                                      device, name, node, gpu
    FOLDER/samples/metric=NAME/date=YYYY-MM-DD/part-*.parquet   at TIMESTAMP (UTC), device INTEGER, value FLOAT
    FOLDER/samples/metric=NAME/manifest.json                    sources, rows and notes
    FOLDER/samples/metric=NAME/aggregates/*.parquet             see `summary.AGGREGATES`

The folder of a metric is written under a temporary name and then renamed, so it is either complete
or absent. A process that is killed may leave a folder `.metric=NAME.*.tmp`. This folder is never
read, and the next conversion of the metric removes it. Devices are written before samples. A store
may therefore have a device without samples, but never samples of an unknown device.
"""

import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from holdfast.core.atomic import fsync_folder, replacing, write_atomic
from holdfast.core.errors import BadUse
from holdfast.trace.notes import Note
from holdfast.trace.telemetry.dictionary import Ids
from holdfast.trace.telemetry.inputs import STORE_MARK
from holdfast.trace.telemetry.metrics import METRICS, Device, Metric
from holdfast.trace.telemetry.summary import AGGREGATES, Columns, Summary, quoted
from holdfast.trace.telemetry.wide_csv import Block

if TYPE_CHECKING:
    import duckdb

VERSION: Final = 1
PART_SAMPLES: Final = 3_000_000
"""Number of samples in a part; writing a part takes about 100 MB of memory."""
DAY_US: Final = 86_400_000_000
DEVICES: Final = "devices.parquet"
PARQUET: Final = "FORMAT parquet, PARQUET_VERSION V2, COMPRESSION zstd, COMPRESSION_LEVEL 1"
"""Options for writing Parquet.

With the encodings of V2 and compression level 1, writing takes a tenth less time than with the
defaults, and the size is the same.
"""


def open_database() -> "duckdb.DuckDBPyConnection":
    """Open a database in memory, to read and write Parquet with little memory."""
    import duckdb

    # The default would be a folder `.tmp` in the working folder. The database removes the files
    # that it puts there.
    spill = str(Path(tempfile.gettempdir()) / f"holdfast-spill-{os.getpid()}")
    connection = duckdb.connect(
        config={
            "memory_limit": "300MB",
            "threads": min(8, os.cpu_count() or 1),
            "temp_directory": spill,
        }
    )
    connection.execute(
        "SET TimeZone = 'UTC'; SET preserve_insertion_order = false; SET enable_progress_bar = false"
    )
    connection.execute(
        "SET python_enable_replacements = false; SET autoinstall_known_extensions = false"
    )
    return connection


class Store:
    """A folder with converted telemetry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> "Store":
        """Make the folder a store if it is not one yet, and open it.

        Raises:
            BadUse: the folder holds other files, or a store of another version.
        """
        store, mark = cls.to_be(folder), folder / STORE_MARK
        if not mark.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(
                mark,
                json.dumps({"schema": "holdfast-telemetry", "version": VERSION}).encode() + b"\n",
            )
        return store

    @classmethod
    def to_be(cls, folder: Path) -> "Store":
        """Return the store that `create` would make or open, without creating anything.

        Raises:
            BadUse: `create` would refuse the folder.
        """
        if (folder / STORE_MARK).exists():
            return cls.open(folder)
        if folder.exists() and (
            not folder.is_dir() or any(not path.match(".*") for path in folder.iterdir())
        ):
            raise BadUse(
                f"{folder} is neither empty nor a telemetry store. Give a new folder, or remove it first."
            )
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Open the store in a folder.

        Raises:
            BadUse: the folder is not a store, or a store of another version.
        """
        try:
            version = json.loads((folder / STORE_MARK).read_text())["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadUse(
                f"{folder} is not a telemetry store. Make one by converting telemetry into it."
            ) from error
        if version != VERSION:
            raise BadUse(
                f"{folder} is a store of version {version}, expected {VERSION}. Convert the telemetry again."
            )
        return cls(folder)

    def metrics(self) -> list[Metric]:
        """Return the complete metrics."""
        found = [
            path.parent.name.partition("=")[2]
            for path in self.folder.glob("samples/metric=*/manifest.json")
        ]
        return [METRICS[name] for name in METRICS if name in found]

    def place(self, metric: Metric) -> Path:
        """Return the folder of a metric."""
        return self.folder / "samples" / f"metric={metric.name}"

    def manifest(self, metric: Metric) -> dict[str, Any]:
        """Return the sources of a metric from its manifest; empty if the store lacks the metric."""
        try:
            manifest: dict[str, Any] = json.loads(
                (self.place(metric) / "manifest.json").read_text()
            )
        except FileNotFoundError:
            return {}
        return manifest

    def samples_sql(self, metric: Metric | None = None) -> str:
        """Return a SELECT of metric, at, device and value, for one metric or for all metrics."""
        pattern = (
            f"{self.folder}/samples/metric={metric.name if metric else '*'}/date=*/part-*.parquet"
        )
        return f'SELECT metric, "at", device, value FROM read_parquet({quoted(pattern)}, hive_partitioning = true)'

    def devices(self, connection: "duckdb.DuckDBPyConnection") -> list[Device]:
        """Return the devices of the store; the id of a device is its index in the list."""
        if not (self.folder / DEVICES).exists():
            return []
        table = quoted(str(self.folder / DEVICES))
        rows = connection.execute(f"SELECT name, node, gpu FROM {table} ORDER BY device").fetchall()
        return [Device(*row) for row in rows]

    def with_devices(
        self, connection: "duckdb.DuckDBPyConnection", devices: Iterable[Device]
    ) -> Ids:
        """Return the ids of the given devices; devices that are missing are added to the store."""
        known = self.devices(connection)
        ids = {device.name: index for index, device in enumerate(known)}
        wanted = list(devices)
        for device in wanted:
            if device.name not in ids:
                ids[device.name] = len(known)
                known.append(device)
        columns = {
            "device": np.arange(len(known), dtype=np.int32),
            "name": np.array([device.name for device in known], dtype=object),
            "node": np.array([device.node for device in known], dtype=object),
            "gpu": np.array(
                [-1 if device.gpu is None else device.gpu for device in known], dtype=np.int32
            ),
        }
        select = "SELECT device, name, node, nullif(gpu, -1) AS gpu FROM arriving ORDER BY device"
        write_parquet(connection, select, columns, self.folder / DEVICES)
        return np.array([ids[device.name] for device in wanted], dtype=np.int64)

    def summary(self, connection: "duckdb.DuckDBPyConnection", metric: Metric) -> Summary:
        """Return a metric's aggregates, as computed when the metric was converted."""
        tables: dict[str, Columns] = {}
        for name, types in AGGREGATES.items():
            path = self.place(metric) / "aggregates" / f"{name}.parquet"
            names = ", ".join(f'"{column}"' for column in types if column != "metric")
            tables[name] = connection.execute(
                f"SELECT {names} FROM {quoted(str(path))}"
            ).fetchnumpy()
        notes = tuple(
            Note(**{**note, "examples": tuple(note["examples"])})
            for note in self.manifest(metric).get("notes", [])
        )
        return Summary(metric=metric, devices=self.devices(connection), tables=tables, notes=notes)


class MetricWriter:
    """Write one metric into a store.

    The parts are written first. `finish` then makes the metric visible.
    """

    def __init__(
        self, store: Store, metric: Metric, connection: "duckdb.DuckDBPyConnection"
    ) -> None:
        self.store, self.metric = store, metric
        self._connection = connection
        samples = store.folder / "samples"
        samples.mkdir(exist_ok=True)
        for stale in samples.glob(f".metric={metric.name}.*.tmp"):
            shutil.rmtree(stale)
        self._building = samples / f".metric={metric.name}.{secrets.token_hex(8)}.tmp"
        self._building.mkdir()
        self._source = self._parts = 0
        self._lock = threading.Lock()

    def begin_source(self) -> None:
        """Start a new source file; the parts that follow are numbered as its parts."""
        self._source += 1

    def restart_source(self) -> None:
        """Remove the parts of the current source file."""
        for part in self._building.glob(f"date=*/part-{self._source:03}-*.parquet"):
            part.unlink()

    def part_writer(self, ids: Ids) -> "PartWriter":
        """Return a function that receives one thread's blocks and writes them as parts.

        `ids` has the store's device id for each column of the file.
        """
        return PartWriter(self, ids, self._connection.cursor())

    def write_rows(self, rows: str, ids: Ids) -> None:
        """Write the rows of a SELECT of at, device and value.

        `ids` has the store's device id for each device number in the rows.
        """
        columns = {"device": np.arange(len(ids), dtype=np.int32), "own": ids.astype(np.int32)}
        self._connection.register("arriving", columns)
        try:
            self._connection.execute(
                f'COPY (SELECT r."at", i.own AS device, r.value, strftime(r."at", \'%Y-%m-%d\') AS date '
                f'FROM ({rows}) r JOIN arriving i USING (device) ORDER BY date, i.own, r."at") '
                f"TO {quoted(str(self._building))} ({PARQUET}, PARTITION_BY (date), "
                f"FILENAME_PATTERN 'part-{self._source:03}-{{i}}', OVERWRITE_OR_IGNORE)"
            )
        finally:
            self._connection.unregister("arriving")
        for part in self._building.glob("date=*/part-*.parquet"):
            with part.open("rb") as file:
                os.fsync(file.fileno())

    def next_part(self, day: int) -> Path:
        """Return the path of the next part of a day, which is counted since the epoch."""
        with self._lock:
            self._parts += 1
            folder = self._building / f"date={np.datetime64(day, 'D')}"
            folder.mkdir(exist_ok=True)
            return folder / f"part-{self._source:03}-{self._parts:05}.parquet"

    def finish(
        self, tables: dict[str, Columns], sources: list[dict[str, Any]], notes: Iterable[Note]
    ) -> None:
        """Write the aggregates and the manifest, and make the metric visible in the store."""
        finish_metric(
            self.store, self.metric, self._building, self._connection, tables, sources, notes
        )

    def abandon(self) -> None:
        """Remove the parts. Call this if the source cannot be read."""
        shutil.rmtree(self._building, ignore_errors=True)


class PartWriter:
    """Collect the blocks of one thread, and write them as parts.

    Each part has samples of one day, sorted by device and time.
    """

    def __init__(
        self, writer: MetricWriter, ids: Ids, connection: "duckdb.DuckDBPyConnection"
    ) -> None:
        self._writer, self._connection = writer, connection
        self._ids = ids.astype(np.int32)
        self._at_us: list[Any] = []
        self._values: list[Any] = []
        self._day: int | None = None
        self._held = 0

    def __call__(self, block: Block) -> None:
        """Add a block."""
        days = block.at_us // DAY_US
        cuts = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
        values = block.values.astype(np.float32)
        for low, high in pairwise(cuts):
            if self._day != days[low] or self._held > PART_SAMPLES:
                self.flush()
                self._day = int(days[low])
            self._at_us.append(block.at_us[low:high])
            self._values.append(values[low:high])
            self._held += values[low:high].size

    def flush(self) -> None:
        """Write the collected blocks as a part."""
        if not self._held or self._day is None:
            return
        at_us = np.concatenate(self._at_us).astype("datetime64[us]")
        # Order by device: neighbours are alike, and a query about one device reads few row groups.
        values = np.concatenate(self._values).T
        there = ~np.isnan(values)
        columns = {
            "at": np.broadcast_to(at_us, values.shape)[there],
            "device": np.broadcast_to(self._ids[:, None], values.shape)[there],
            "value": values[there],
        }
        self._at_us, self._values, self._held = [], [], 0
        if len(columns["value"]):
            select = 'SELECT arriving."at", device, value FROM arriving'
            write_parquet(self._connection, select, columns, self._writer.next_part(self._day))


def finish_metric(
    store: Store,
    metric: Metric,
    building: Path,
    connection: "duckdb.DuckDBPyConnection",
    tables: dict[str, Columns],
    sources: list[dict[str, Any]],
    notes: Iterable[Note],
) -> None:
    """Finish the folder of a metric, and make it visible in the store.

    The aggregates and the manifest are added, and then the folder is renamed to the metric's name.
    """
    place = building / "aggregates"
    place.mkdir(exist_ok=True)
    for name, columns in tables.items():
        names = ", ".join(
            f'arriving."{column}"::{AGGREGATES[name][column]} AS "{column}"' for column in columns
        )
        write_parquet(
            connection, f"SELECT {names} FROM arriving", columns, place / f"{name}.parquet"
        )
    record = {
        "metric": metric.name,
        "unit": metric.unit,
        "sources": sources,
        "notes": [asdict(n) for n in notes],
    }
    write_atomic(building / "manifest.json", json.dumps(record, indent=1).encode() + b"\n")
    for folder in building.iterdir():
        if folder.is_dir():
            fsync_folder(folder)
    building.rename(store.place(metric))
    fsync_folder(store.place(metric).parent)


def write_parquet(
    connection: "duckdb.DuckDBPyConnection", select: str, columns: Columns, path: Path
) -> None:
    """Write the result of a SELECT over NumPy columns to a Parquet file atomically and durably.

    In `select`, the table of the columns is named `arriving`.
    """
    connection.register("arriving", columns)
    try:
        with replacing(path) as temporary:
            connection.execute(f"COPY ({select}) TO {quoted(str(temporary))} ({PARQUET})")
    finally:
        connection.unregister("arriving")
