"""The nodes: health, history of tests, and the cordons."""

from typing import Any

from sqlalchemy import Connection, Select, select

from holdfast.core.ledger import schema
from holdfast.ui.console.queries.paging import PAGE_ROWS, plain

NAME_LIMIT = 255


def nodes_query(after: str, limit: int) -> Select[Any]:
    """Return the query for the nodes with names after a name, in order."""
    nodes = schema.nodes
    return select(nodes).where(nodes.c.name > after).order_by(nodes.c.name).limit(limit)


def nodes_page(connection: Connection, after: str) -> dict[str, Any]:
    """Return one page of the nodes: `nodes`, and `next`, the last name or None."""
    rows = plain(connection, nodes_query(after[:NAME_LIMIT], PAGE_ROWS + 1))
    for row in rows:
        row["verdicts"] = row["verdicts"][-5:]
        row["seen"] = seen_of_node(row["cordoned_at_s"])
    more = len(rows) > PAGE_ROWS
    return {"nodes": rows[:PAGE_ROWS], "next": rows[PAGE_ROWS - 1]["name"] if more else None}


def seen_of_node(cordoned_at_s: float | None) -> str:
    """Return the state of a node that a person acts on: the time of its cordon."""
    return "" if cordoned_at_s is None else repr(cordoned_at_s)
