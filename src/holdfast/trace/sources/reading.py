"""What an adapter is, what it makes of its source, and the span of submissions that is wanted."""

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
    """A source read: a table of jobs in the database, and what is known beside it."""

    table: str
    """Name of the table; its columns are some of `schema.JOB_COLUMNS`."""
    columns: frozenset[str]
    clusters: tuple[Cluster, ...]
    notes: tuple[Note, ...] = field(default=())
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By cluster, columns of the table that it has no values of, where only others of the table's clusters do."""
    ledger_url: str = ""
    """Of Holdfast's own ledger, where that is the source: it and the journals of its runs know more than jobs."""

    def columns_of(self, cluster: str) -> frozenset[str]:
        """The columns that a cluster has."""
        return self.columns - self.lacking.get(cluster, frozenset())

    @classmethod
    def of(
        cls,
        connection: "duckdb.DuckDBPyConnection",
        table: str,
        *clusters: Cluster,
        notes: tuple[Note, ...] = (),
    ) -> "Reading":
        """The reading of a table that was made: its columns are asked of the database."""
        columns = frozenset(row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall())
        return cls(table=table, columns=columns, clusters=clusters, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An adapter: one published or site's form of job records."""

    name: str
    """As `--format` takes it."""
    title: str
    recognises: Callable[[Path], bool]
    """Whether a path is of this form, by its name and its first few kB; never raises, never reads more."""
    read: Callable[["duckdb.DuckDBPyConnection", Path, str], Reading]
    """`read(connection, path, table)` makes the table. Raises BadTrace."""
    settle: Callable[["duckdb.DuckDBPyConnection", Reading], Reading] | None = None
    """What is left to do once several files of one cluster were joined, each of which may hold the same job."""


def drops_bad_rows(connection: "duckdb.DuckDBPyConnection") -> bool:
    """Whether rows that cannot be read are to be dropped and counted, in place of failing: `load` says so."""
    row = connection.execute("SELECT getvariable('bad_rows')").fetchone()
    return row is not None and row[0] == "drop"


def span_ends(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Return the ends of the span of submissions, each ISO 8601 in UTC, without a zone; None: open.

    Raises:
        BadUse: one is no time, or no time lies between them.
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
    """Keep the jobs submitted from `since` on and before `until` (see `span_ends`) and no others.

    Raises:
        BadUse: as `span_ends`.
    """
    for name, at in zip(("since", "until"), span_ends(since, until), strict=True):
        connection.execute(f"SET VARIABLE {name} = $1::TIMESTAMP", [at])


def wanted(connection: "duckdb.DuckDBPyConnection") -> str:
    """SQL: whether a job is wanted; '' where all are. One of unknown submission is, in a span without a beginning."""
    since, until = connection.execute(
        "SELECT getvariable('since'), getvariable('until')"
    ).fetchall()[0]
    ends = [
        f"submit_at {order} TIMESTAMP '{at}'" for order, at in ((">=", since), ("<", until)) if at
    ]
    within = " AND ".join(ends)
    return f"(({within}) OR submit_at IS NULL)" if within and not since else within


def keep_span(connection: "duckdb.DuckDBPyConnection", reading: "Reading") -> None:
    """Drop the jobs that are not wanted from a table; nothing of a source that knows no submissions."""
    if "submit_at" in reading.columns and (condition := wanted(connection)):
        connection.execute(f"DELETE FROM {reading.table} WHERE NOT coalesce({condition}, false)")
