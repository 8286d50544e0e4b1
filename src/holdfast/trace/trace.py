"""Hold the tables and aggregates of one or more clusters in a scratch database."""

import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.core.errors import BadUse
from holdfast.core.words import sentence
from holdfast.trace import aggregates
from holdfast.trace.errors import LeftOut
from holdfast.trace.schema import jobs_view
from holdfast.trace.sources.reading import Reading
from holdfast.trace.table import Table

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.clusters import Cluster
    from holdfast.trace.notes import Note

_AGGREGATES_READ: Final = re.compile(r"\b(?:FROM|JOIN)\s+agg_(\w+)")
_TELEMETRY_READ: Final = re.compile(r"\b(?:FROM|JOIN)\s+(samples|devices|metrics)\b")
_NO_SAMPLES: Final = re.compile(r"Table with name (samples|devices) does not exist")
SCRATCH: Final = "holdfast-trace-"
"""Prefix of the names of scratch folders, in the system's folder for temporary files."""
STALE_S: Final = 60.0
"""Age in seconds from which on a scratch folder may be removed.

A younger folder may belong to a process that is just creating it.
"""
MAX_THREADS: Final = 8
"""The most threads of the database. More threads gain nothing, and each needs its own buffers."""


def open_scratch(*, memory_limit_mb: int) -> "tuple[duckdb.DuckDBPyConnection, Path]":
    """Open a database on disk in a new scratch folder; a `Trace` must take over both.

    Args:
        memory_limit_mb: memory limit of the database in MB; beyond this, it spills into the folder.
    """
    import duckdb

    sweep_scratch()
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
    spill = folder / "spill"
    spill.mkdir()
    connection = duckdb.connect(
        folder / "trace.duckdb",
        config={"memory_limit": f"{memory_limit_mb}MB", "temp_directory": str(spill)},
    )
    # Times are naive UTC, and DuckDB converts a text with an offset to this time zone.
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")  # The progress bar would be printed.
    connection.execute(
        "SET python_enable_replacements = false; SET autoinstall_known_extensions = false"
    )
    connection.execute(f"SET threads = {min(MAX_THREADS, os.cpu_count() or 1)}")
    return connection, folder


def sweep_scratch() -> None:
    """Remove the scratch folders of processes that were killed.

    A live process holds a lock on its database, so its folder is kept.
    """
    own = f"{SCRATCH}{os.getpid()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if folder.name.startswith(own):
            # A process can always lock a file that it has locked itself, so the lock shows nothing
            # here. Moreover, closing any handle of the file would release the process's lock.
            continue
        try:
            if (
                folder.stat().st_uid != os.getuid()
                or time.time() - folder.stat().st_mtime < STALE_S
            ):
                continue
            with (folder / "trace.duckdb").open("rb+") as file:
                # DuckDB holds this lock while the database is open. The kernel releases it when the
                # process ends.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


class Trace:
    """Hold job records, and optionally telemetry, of one or more clusters.

    `holdfast.trace.load` reads a trace, and `holdfast.trace.store.merge_partials` merges one from
    partial results. A trace owns a scratch folder. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        connection: "duckdb.DuckDBPyConnection",
        scratch: Path,
        readings: Sequence[Reading],
        *,
        duration: str,
        compared: frozenset[str] = frozenset(),
        has_jobs: bool = True,
    ) -> None:
        self.connection = connection
        self.duration = duration
        """Definition of `duration_s`, one of `schema.DURATIONS`."""
        self.clusters: Mapping[str, Cluster] = {
            cluster.name: cluster for reading in readings for cluster in reading.clusters
        }
        self.compared = compared
        """Names of the clusters that serve only for comparison."""
        self.notes: list[Note] = [note for reading in readings for note in reading.notes]
        """Notes of reading and checking so far."""
        self.ledger_urls = [reading.ledger_url for reading in readings if reading.ledger_url]
        """URLs of the Holdfast ledgers among the sources."""
        self.metrics: frozenset[str] = frozenset()
        """Telemetry metrics in the views `samples` and `devices`, or in adopted aggregates."""
        self.folders: list[Path] = []
        """Folders whose Parquet files the views read; `select` may read them too."""
        self._remove_scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._locked = False
        self.columns: Mapping[str, frozenset[str]] = {
            cluster.name: reading.columns_of(cluster.name)
            for reading in readings
            for cluster in reading.clusters
        }
        """For each cluster, the columns of `jobs` that have values."""
        self._prepared: set[str] = set()
        self._aggregated: dict[str, Table] = {}
        self._has_jobs = has_jobs
        if has_jobs:
            connection.execute(
                jobs_view(
                    {reading.table: reading.columns for reading in readings}, duration=duration
                )
            )

    def has(self, *columns: str, cluster: str | None = None) -> bool:
        """Return True if `cluster` has all of these columns of `jobs`.

        Without `cluster`, return True if at least one cluster has all of them.
        """
        names = [cluster] if cluster else list(self.columns)
        return any(self.columns.get(name, frozenset()).issuperset(columns) for name in names)

    def require(self, *columns: str) -> None:
        """Raise `LeftOut`, unless at least one cluster has all of these columns.

        Raises:
            LeftOut: no cluster has all columns; the message names the missing ones.
        """
        if not self.has(*columns):
            missing = [column for column in columns if not self.has(column)] or list(columns)
            raise LeftOut(f"Left out: the trace has no {' and no '.join(missing)}.")

    def has_metrics(self, *metrics: str) -> bool:
        """Return True if the trace has telemetry of all these metrics."""
        return self.metrics.issuperset(metrics)

    def require_metrics(self, *metrics: str) -> None:
        """Raise `LeftOut`, unless the trace has telemetry of all these metrics.

        Raises:
            LeftOut: a metric is missing; the message names the missing ones.
        """
        if missing := [metric for metric in metrics if metric not in self.metrics]:
            raise LeftOut(f"Left out: no telemetry of {' and '.join(missing)} was given.")

    def prepare(self, name: str) -> str:
        """Compute an aggregate of `holdfast.trace.aggregates`, unless it was computed before.

        Returns:
            The name of the aggregate's table, for use in SQL.

        Raises:
            LeftOut: the trace lacks the telemetry or the single samples that the aggregate reads,
                or the trace was merged from partial results that lack this aggregate.
        """
        if name not in self._prepared:
            if not self._has_jobs:
                raise LeftOut(f"Left out: the partial results that were merged hold no {name}.")
            sql = aggregates.sql(name)
            for other in set(_AGGREGATES_READ.findall(sql)):
                self.prepare(other)
            if missing := set(_TELEMETRY_READ.findall(sql)) - self._tables():
                what = f"single {min(missing)}" if self.metrics else "telemetry"
                raise LeftOut(f"Left out: the trace has no {what}.")
            self.adopt(name, sql)
        return f"agg_{name}"

    def _tables(self) -> set[str]:
        """Return the names of all tables and views."""
        return {row[0] for row in self.connection.execute("SHOW TABLES").fetchall()}

    def adopt(self, name: str, sql: str) -> None:
        """Store the result of a SELECT as an aggregate, in place of the result of its SQL file.

        Use `adopt` for aggregates that were computed elsewhere, such as streamed telemetry and
        merged partial results.
        """
        self.connection.execute(f"CREATE OR REPLACE TABLE agg_{name} AS {sql}")
        self._prepared.add(name)
        self._aggregated.pop(name, None)

    def aggregate(self, name: str) -> Table:
        """Return all rows of an aggregate; compute the aggregate if needed."""
        if name not in self._aggregated:
            self._aggregated[name] = self.query(f"SELECT * FROM {self.prepare(name)} ORDER BY ALL")
        return self._aggregated[name]

    def query(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Table:
        """Run trusted SQL over `jobs`, the aggregates and the telemetry tables."""
        cursor = self.connection.execute(sql, parameters)
        return Table(_filled(cursor.fetchnumpy()))

    def select(self, sql: str) -> Table:
        """Run a user's SELECT, which can change nothing and read only this trace's files.

        After the first call, the database cannot access any other file. The trace can still be
        queried and aggregated, but not be written elsewhere.

        Raises:
            BadUse: the text is not a single SELECT, or the database refuses it; the message has the
                reason.
        """
        import duckdb

        try:
            statements = self.connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise BadUse(
                    "Expected one SELECT over jobs, samples, devices or an agg_ table. Give a single SELECT."
                )
            self._shut()
            # The query runs in another thread, because only this thread can handle signals, and a
            # query in it would block them for minutes.
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(self.query, sql)
                try:
                    return answer.result()
                except KeyboardInterrupt:
                    self.connection.interrupt()
                    raise
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            # Cut off the copy of the query, with a marker below it, that ends the message.
            message = " ".join(str(error).partition("\n\nLINE ")[0].split())
            if _NO_SAMPLES.search(message):
                raise BadUse(
                    "The trace has no individual samples. Give a store that holdfast trace convert wrote, or long "
                    "Parquet, by --metrics; of other telemetry there are the agg_metric_ tables."
                ) from error
            raise BadUse(
                f"The query cannot be answered: {sentence(message)} Correct it; `DESCRIBE jobs` lists columns."
            ) from error

    def _shut(self) -> None:
        if not self._locked:
            self.connection.execute(
                "SET allowed_directories = ?", [[str(folder) for folder in self.folders]]
            )
            self.connection.execute("SET enable_external_access = false")
            self.connection.execute("SET lock_configuration = true")
            self._locked = True

    def close(self) -> None:
        """Close the database and remove the scratch folder."""
        self.connection.close()
        self._remove_scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def _filled(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the missing values in NumPy's masked columns by NaN, NaT or None."""
    return {name: _unmasked(column) for name, column in columns.items()}


def _unmasked(column: Any) -> Any:
    import numpy as np

    if not hasattr(column, "filled"):
        return column
    if not np.any(column.mask):
        return column.data
    match column.dtype.kind:
        case "i" | "u" | "b":
            return column.astype(float).filled(np.nan)
        case "f":
            return column.filled(np.nan)
        case "M":
            return column.filled(np.datetime64("NaT"))
        case "m":
            return column.filled(np.timedelta64("NaT"))
        case _:
            return np.where(
                column.mask, None, column.data
            )  # filled(None) would use NumPy's own filler, '?'.
