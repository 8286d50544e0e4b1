"""The span of submissions that is wanted: held by the database while sources are read."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.sources.reading import Reading


def set_span(connection: "duckdb.DuckDBPyConnection", since: str | None, until: str | None) -> None:
    """Want the jobs submitted from `since` on and before `until`, each ISO 8601 in UTC; None: open.

    Raises:
        BadUse: one is no time, or no time lies between them.
    """
    ends = []
    for name, text in (("since", since), ("until", until)):
        try:
            at = datetime.fromisoformat(text) if text else None
        except ValueError as error:
            raise BadUse(
                f"{name} is {text!r}. Expected a date or a time, such as 2023-03-01."
            ) from error
        naive = at.astimezone(UTC).replace(tzinfo=None) if at and at.tzinfo else at
        connection.execute(f"SET VARIABLE {name} = $1::TIMESTAMP", [naive])
        ends.append(naive)
    first, end = ends
    if first and end and end <= first:
        raise BadUse(f"until ({until}) is not after since ({since}). Give an until that is later.")


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
