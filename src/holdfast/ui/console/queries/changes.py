"""The changes of the ledger since a position, for the stream to browsers.

A position is `EVENT.INCIDENT.CHECKPOINT.ACTION`: the highest id of each table. The ids grow. So a
browser that connects again with its last position receives the later changes from the ledger, even
from another process of the console.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from holdfast.core.ledger import schema

TABLES = (
    (schema.events, schema.events.c.event_id, schema.events.c.run_id),
    (schema.incidents, schema.incidents.c.incident_id, schema.incidents.c.run_id),
    (schema.checkpoints, schema.checkpoints.c.checkpoint_id, schema.checkpoints.c.run_id),
    (schema.actions, schema.actions.c.action_id, schema.actions.c.target),
)
ROWS_LIMIT = 500
"""The most new rows of one table in a change; more become a snapshot, and the page is reloaded."""
STATES_LIMIT = 200
_POSITION = re.compile(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.(\d{1,18})")

Position = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """The difference between two positions."""

    position: Position
    targets: frozenset[str]
    """The runs, incidents and nodes that changed."""
    is_snapshot: bool = False
    """True if too much changed to name the targets."""

    @property
    def id(self) -> str:
        """The id of the event in the stream, which a browser sends back as `Last-Event-ID`."""
        return ".".join(map(str, self.position))


def position_of(text: str) -> Position | None:
    """Return the position that a browser sent; None if the text is none."""
    found = _POSITION.fullmatch(text)
    return None if found is None else tuple(int(one) for one in found.groups())


def newest(connection: Connection) -> Position:
    """Return the position of the ledger."""
    return tuple(
        int(connection.execute(select(func.max(key))).scalar() or 0) for _, key, _ in TABLES
    )


def since(connection: Connection, position: Position) -> Change:
    """Return the change since a position."""
    there = newest(connection)
    targets: set[str] = set()
    for (_, key, target), before, after in zip(TABLES, position, there, strict=True):
        if after - before > ROWS_LIMIT or after < before:
            return Change(there, frozenset(), is_snapshot=True)
        if after > before:
            found = select(target).where(key > before, key <= after).distinct().limit(ROWS_LIMIT)
            targets |= {str(one) for one in connection.execute(found).scalars()}
    return Change(there, frozenset(targets))


def states(connection: Connection) -> Mapping[str, tuple[Any, ...]]:
    """Return the facts of running runs that change without a new row: state and highest step."""
    runs, attempts = schema.runs, schema.attempts
    step = (
        select(func.max(attempts.c.last_step))
        .where(attempts.c.run_id == runs.c.run_id)
        .scalar_subquery()
    )
    going = runs.c.state.in_(("running", "queued"))
    query = select(runs.c.run_id, runs.c.state, step).where(going).limit(STATES_LIMIT)
    return {row[0]: tuple(row) for row in connection.execute(query)}
