"""The counts behind the metrics that the page Now does not show."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Select, case, func, select

from holdfast.core.ledger import schema
from holdfast.ui.console.queries.paging import plain

INCIDENT_KINDS = ("exit", "hang", "anomaly")
NODES_LIMIT = 1000


def states_query() -> Select[Any]:
    """Return the query for the number of runs in each state."""
    return select(schema.runs.c.state, func.count()).group_by(schema.runs.c.state)


def incidents_query(run_ids: Collection[str]) -> Select[Any]:
    """Return the query for the number of incidents of each kind, by run."""
    table = schema.incidents
    counts = [func.count(case((table.c.kind == kind, 1))).label(kind) for kind in INCIDENT_KINDS]
    return (
        select(table.c.run_id, *counts)
        .where(table.c.run_id.in_(sorted(run_ids)))
        .group_by(table.c.run_id)
    )


def cordoned_nodes_query() -> Select[Any]:
    """Return the query for the cordoned nodes, by name."""
    nodes = schema.nodes
    found = select(nodes.c.name, nodes.c.probability).where(nodes.c.cordoned_at_s.is_not(None))
    return found.order_by(nodes.c.name).limit(NODES_LIMIT)


def counts(connection: Connection, run_ids: Collection[str]) -> dict[str, Any]:
    """Return `states` (runs by state), `incidents` (by run, then kind) and `nodes` (cordoned)."""
    return {
        "states": {row[0]: int(row[1]) for row in connection.execute(states_query())},
        "incidents": {row["run_id"]: row for row in plain(connection, incidents_query(run_ids))},
        "nodes": plain(connection, cordoned_nodes_query()),
    }
