"""Define an adapter, its result, and the span of submissions to keep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import BadUse
from holdfast.trace.clusters import Cluster
from holdfast.trace.notes import Note
from holdfast.trace.sources.plain_text import csv_header, head
from holdfast.trace.sources.rows import read_rows

if TYPE_CHECKING:
    import duckdb

__all__ = ["Note", "Reading", "Source", "csv_header", "drops_bad_rows", "head", "read_rows"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of reading a source: a table of jobs, and descriptions of clusters and findings."""

    table: str
    """Name of the table; its columns are some of `schema.JOB_COLUMNS`."""
    columns: frozenset[str]
    clusters: tuple[Cluster, ...]
    notes: tuple[Note, ...] = field(default=())
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Columns without values by cluster, if other clusters of the table have values."""
    ledger_url: str = ""
    """URL of Holdfast's ledger, if that is the source; analyses also read its runs and journals."""

    def columns_of(self, cluster: str) -> frozenset[str]:
        """Return the columns that a cluster has."""
        return self.columns - self.lacking.get(cluster, frozenset())

    @classmethod
    def of(
        cls,
        connection: "duckdb.DuckDBPyConnection",
        table: str,
        *clusters: Cluster,
        notes: tuple[Note, ...] = (),
    ) -> "Reading":
        """Make the reading of an existing table; the columns come from the database."""
        columns = frozenset(row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall())
        return cls(table=table, columns=columns, clusters=clusters, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An adapter: reads one format of job records."""

    name: str
    """Name of the format for `--format`."""
    title: str
    recognises: Callable[[Path], bool]
    """Return True if a path has this format, by its name and its first few kB; never raises."""
    read: Callable[["duckdb.DuckDBPyConnection", Path, str], Reading]
    """`read(connection, path, table)` makes the table. Raises BadTrace."""
    settle: Callable[["duckdb.DuckDBPyConnection", Reading], Reading] | None = None
    """Remove duplicates after several files of one cluster were joined, which may hold the same
    job.
    """


def drops_bad_rows(connection: "duckdb.DuckDBPyConnection") -> bool:
    """Return True if `load` was called to drop and count unreadable rows."""
    row = connection.execute("SELECT getvariable('bad_rows')").fetchone()
    return row is not None and row[0] == "drop"


def span_ends(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Parse the first and the last submission time, ISO 8601 in UTC; None for no limit.

    Returns:
        Both ends without a zone.

    Raises:
        BadUse: a text is not a time, or the span is empty.
    """
    first, end = _moment("since", since), _moment("until", until)
    if first and end and end <= first:
        raise BadUse(f"until ({until}) is not after since ({since}). Give an until that is later.")
    return first, end


def _moment(name: str, text: str | None) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError as error:
        raise BadUse(
            f"{name} is {text!r}. Expected a date or a time, such as 2023-03-01."
        ) from error
    return at.astimezone(UTC).replace(tzinfo=None) if at and at.tzinfo else at


def set_span(connection: "duckdb.DuckDBPyConnection", since: str | None, until: str | None) -> None:
    """Keep only jobs submitted at `since` or later and before `until` (see `span_ends`).

    Raises:
        BadUse: as `span_ends`.
    """
    for name, at in zip(("since", "until"), span_ends(since, until), strict=True):
        connection.execute(f"SET VARIABLE {name} = $1::TIMESTAMP", [at])


def wanted(connection: "duckdb.DuckDBPyConnection") -> str:
    """Return SQL that is true for jobs to keep; '' to keep all.

    Jobs without a submission time are kept if the span has no start.
    """
    since, until = connection.execute(
        "SELECT getvariable('since'), getvariable('until')"
    ).fetchall()[0]
    ends = [
        f"submit_at {order} TIMESTAMP '{at}'" for order, at in ((">=", since), ("<", until)) if at
    ]
    within = " AND ".join(ends)
    return f"(({within}) OR submit_at IS NULL)" if within and not since else within


def keep_span(connection: "duckdb.DuckDBPyConnection", reading: "Reading") -> None:
    """Delete the jobs outside the span from a table, unless the source has no submission times."""
    if "submit_at" in reading.columns and (condition := wanted(connection)):
        connection.execute(f"DELETE FROM {reading.table} WHERE NOT coalesce({condition}, false)")
