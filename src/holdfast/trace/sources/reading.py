"""Define an adapter and its result, and restrict jobs to a time span of submissions."""

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
    """The result of reading job records: a table of jobs, descriptions of clusters, and notes."""

    table: str
    """Name of the table in the database; its columns are some of `schema.JOB_COLUMNS`."""
    columns: frozenset[str]
    clusters: tuple[Cluster, ...]
    notes: tuple[Note, ...] = field(default=())
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For each cluster, the columns in which it has no values although other clusters do."""
    ledger_url: str = ""
    """URL of Holdfast's ledger, if the jobs come from it. Analyses read its runs and journals."""

    def columns_of(self, cluster: str) -> frozenset[str]:
        """Return the columns in which a cluster has values."""
        return self.columns - self.lacking.get(cluster, frozenset())

    @classmethod
    def of(
        cls,
        connection: "duckdb.DuckDBPyConnection",
        table: str,
        *clusters: Cluster,
        notes: tuple[Note, ...] = (),
    ) -> "Reading":
        """Return a reading for an existing table, with the columns that the table has."""
        columns = frozenset(row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall())
        return cls(table=table, columns=columns, clusters=clusters, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Define an adapter, which reads one format of job records."""

    name: str
    """Name of the format, as given to `--format`."""
    title: str
    recognises: Callable[[Path], bool]
    """Return True if a path has this format, judged by its name and its first kB; never raise."""
    read: Callable[["duckdb.DuckDBPyConnection", Path, str], Reading]
    """Create the table, `read(connection, path, table)`; raise BadTrace for an unreadable file."""
    settle: Callable[["duckdb.DuckDBPyConnection", Reading], Reading] | None = None
    """Remove duplicates after several files of a cluster were joined.

    Two of the files may contain the same job.
    """


def drops_bad_rows(connection: "duckdb.DuckDBPyConnection") -> bool:
    """Return True if unreadable rows are to be dropped and counted, as `load` was asked to do."""
    row = connection.execute("SELECT getvariable('bad_rows')").fetchone()
    return row is not None and row[0] == "drop"


def span_ends(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Parse the ends of a time span of submissions, ISO 8601 in UTC; None means no limit.

    Returns:
        Both ends as times in UTC without a zone.

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
    """Restrict reading to jobs submitted at or after `since` and before `until`; see `span_ends`.

    Raises:
        BadUse: a text is not a time, or the span is empty.
    """
    for name, at in zip(("since", "until"), span_ends(since, until), strict=True):
        connection.execute(f"SET VARIABLE {name} = $1::TIMESTAMP", [at])


def wanted(connection: "duckdb.DuckDBPyConnection") -> str:
    """Return an SQL condition for the jobs to keep; '' if all jobs are kept.

    If the span has no start, jobs without a submission time are kept.
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
    """Delete the jobs outside the time span from a table.

    If the source has no submission times, all jobs are kept.
    """
    if "submit_at" in reading.columns and (condition := wanted(connection)):
        connection.execute(f"DELETE FROM {reading.table} WHERE NOT coalesce({condition}, false)")
