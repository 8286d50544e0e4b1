"""Bounded lists: records of a table, and pages by key."""

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, Table, select

from holdfast.core.errors import BadUse

PAGE_ROWS = 50
LIMIT_S = 1.0
"""Seconds that the queries of one page may take."""
Record = TypeVar("Record")


def records(
    connection: Connection,
    record: type[Record],
    table: Table,
    where: Any,
    *,
    newest_by: Any,
    limit: int,
) -> tuple[list[Record], bool]:
    """Return the newest records of a table, oldest first, and True if there are no others.

    Args:
        connection: a transaction of `Ledger.bounded_reading`.
        record: the dataclass of the table's rows.
        table: the table.
        where: the condition on the rows.
        newest_by: the column that orders the rows.
        limit: the most records.
    """
    names = list(getattr(record, "__dataclass_fields__"))  # noqa: B009 - mypy knows no such attribute of a type variable
    query = select(*[table.c[name] for name in names]).where(where)
    rows = connection.execute(query.order_by(newest_by.desc()).limit(limit + 1)).mappings().all()
    return [record(**row) for row in reversed(rows[:limit])], len(rows) <= limit


def plain(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    """Return the rows of a query as dictionaries."""
    return [dict(row) for row in connection.execute(query).mappings()]


def key_of(token: str, kinds: Sequence[type]) -> list[Any] | None:
    """Return the values of a page's key; None for an empty token.

    Raises:
        BadUse: the token is not of this form.
    """
    if not token:
        return None
    parts = token.split("~")
    try:
        if len(parts) == len(kinds) and len(token) <= 200:
            return [kind(part) for kind, part in zip(kinds, parts, strict=True)]
    except (ValueError, OverflowError):
        pass
    raise BadUse("The link to the next page is damaged. Go back to the first page.")


def token_of(*values: object) -> str:
    """Return the token of a page's key."""
    return "~".join(repr(value) if isinstance(value, float) else str(value) for value in values)
