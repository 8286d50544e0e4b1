"""A trace: the normalised tables of one or more clusters in a scratch database, and its aggregates."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.trace import aggregates
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut
from holdfast.trace.schema import jobs_view
from holdfast.trace.sources.reading import Note, Reading
from holdfast.trace.table import Table

if TYPE_CHECKING:
    import duckdb


class Trace:
    """Job records, and telemetry where there is any, of one or more clusters.

    Made by `holdfast.trace.load`; use it as a context manager, or call `close`: it owns a scratch folder.
    """

    def __init__(
        self,
        connection: "duckdb.DuckDBPyConnection",
        scratch: Path,
        readings: Sequence[Reading],
        *,
        duration: str,
        compared: frozenset[str] = frozenset(),
    ) -> None:
        self.connection = connection
        self.duration = duration
        """What `duration_s` means: one of `schema.DURATIONS`."""
        self.clusters: Mapping[str, Cluster] = {
            cluster.name: cluster for reading in readings for cluster in reading.clusters
        }
        self.compared = compared
        """Names of the clusters that are only there to be compared with."""
        self.notes: list[Note] = [note for reading in readings for note in reading.notes]
        """What was found, dropped or mended so far."""
        self._scratch = scratch
        self._columns = {cluster.name: reading.columns for reading in readings for cluster in reading.clusters}
        self._aggregated: dict[str, Table] = {}
        connection.execute(jobs_view({reading.table: reading.columns for reading in readings}, duration=duration))

    def has(self, *columns: str, cluster: str | None = None) -> bool:
        """Whether all of these columns of `jobs` are there: in `cluster`, or in any one."""
        names = [cluster] if cluster else list(self._columns)
        return any(self._columns.get(name, frozenset()).issuperset(columns) for name in names)

    def require(self, *columns: str) -> None:
        """Leave the analysis out unless some cluster has all of these columns.

        Raises:
            LeftOut: with the columns that are missing.
        """
        if not self.has(*columns):
            missing = [column for column in columns if not self.has(column)] or list(columns)
            raise LeftOut(f"Left out: the trace has no {' and no '.join(missing)}.")

    def aggregate(self, name: str) -> Table:
        """The aggregate `name` of `holdfast.trace.aggregates`; computed once, also there as table `agg_NAME`."""
        if name not in self._aggregated:
            self.connection.execute(f"CREATE OR REPLACE TABLE agg_{name} AS {aggregates.sql(name)}")
            self._aggregated[name] = self.query(f"SELECT * FROM agg_{name}")
        return self._aggregated[name]

    def query(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Table:
        """The answer of any SQL over `jobs`, the aggregates and telemetry's tables."""
        cursor = self.connection.execute(sql, parameters)
        return Table(_filled(cursor.fetchnumpy()))

    def close(self) -> None:
        """Close the database and remove the scratch folder."""
        self.connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _filled(columns: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy's masked columns with NaN, NaT or None where a value is missing."""
    import numpy as np

    filled = {}
    for name, column in columns.items():
        if isinstance(column, np.ma.MaskedArray):
            if column.mask is np.ma.nomask or not column.mask.any():
                column = column.data
            elif column.dtype.kind in "iub":
                column = column.astype(float).filled(np.nan)
            elif column.dtype.kind == "f":
                column = column.filled(np.nan)
            elif column.dtype.kind in "mM":
                column = column.filled(np.datetime64("NaT"))
            else:
                column = np.where(column.mask, None, column.data)
        filled[name] = column
    return filled
