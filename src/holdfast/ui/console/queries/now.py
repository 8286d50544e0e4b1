"""Query the page Now and the list of runs: running, newest, and waiting for a person."""

from typing import Any

from sqlalchemy import Connection, Select, func, select, tuple_

from holdfast.core.ledger import schema
from holdfast.ui.console.queries.paging import PAGE_ROWS, key_of, plain, token_of

ACTIVE_LIMIT = 100
RECENT_LIMIT = 20
WAITING_LIMIT = 20
PROPOSALS = ("proposal", "approved", "withdrawn")
PROPOSALS_LIMIT = 200


def _run_columns() -> Select[Any]:
    runs, attempts, incidents, checkpoints = (
        schema.runs, schema.attempts, schema.incidents, schema.checkpoints,
    )  # fmt: skip
    saved = select(checkpoints.c.step).where(checkpoints.c.run_id == runs.c.run_id)
    newest = saved.order_by(checkpoints.c.checkpoint_id.desc()).limit(1)
    usable = checkpoints.c.state.in_(("healthy", "verified", "written"))
    return select(
        runs.c.run_id,
        runs.c.state,
        runs.c.started_at_s,
        runs.c.ended_at_s,
        runs.c.exit_code,
        runs.c.outcome,
        runs.c.host,
        select(func.max(attempts.c.number))
        .where(attempts.c.run_id == runs.c.run_id)
        .scalar_subquery()
        .label("attempts"),
        select(func.max(attempts.c.last_step))
        .where(attempts.c.run_id == runs.c.run_id)
        .scalar_subquery()
        .label("step"),
        select(func.count())
        .where(incidents.c.run_id == runs.c.run_id)
        .scalar_subquery()
        .label("incidents"),
        newest.where(usable).scalar_subquery().label("checkpoint_step"),
        newest.where(checkpoints.c.state == "healthy").scalar_subquery().label("healthy_step"),
    )


def active_query() -> Select[Any]:
    """Return the query for the runs that go on or wait in a queue, newest first."""
    runs = schema.runs
    going = runs.c.state.in_(("running", "queued"))
    return _run_columns().where(going).order_by(runs.c.started_at_s.desc()).limit(ACTIVE_LIMIT)


def runs_query(before: list[Any] | None, limit: int) -> Select[Any]:
    """Return the query for the newest runs that started before a key of start and id."""
    runs = schema.runs
    query = _run_columns().order_by(runs.c.started_at_s.desc(), runs.c.run_id.desc()).limit(limit)
    if before is None:
        return query
    return query.where(tuple_(runs.c.started_at_s, runs.c.run_id) < tuple_(*before))


def failed_query() -> Select[Any]:
    """Return the query for the newest failed runs."""
    runs = schema.runs
    found = _run_columns().where(runs.c.state == "failed")
    return found.order_by(runs.c.started_at_s.desc()).limit(WAITING_LIMIT)


def kind_query(kind: str, limit: int, before: int | None = None) -> Select[Any]:
    """Return the query for the newest events of one kind, below an id."""
    events = schema.events
    query = select(events).where(events.c.kind == kind)
    if before is not None:
        query = query.where(events.c.event_id < before)
    return query.order_by(events.c.event_id.desc()).limit(limit)


def evaluations_query(before: list[Any] | None, limit: int) -> Select[Any]:
    """Return the query for the newest evaluations that started before a key of start and id."""
    table = schema.evaluations
    query = (
        select(table)
        .order_by(table.c.started_at_s.desc(), table.c.evaluation_id.desc())
        .limit(limit)
    )
    if before is None:
        return query
    return query.where(tuple_(table.c.started_at_s, table.c.evaluation_id) < tuple_(*before))


def cordoned_query() -> Select[Any]:
    """Return the query for the cordoned nodes, by name."""
    nodes = schema.nodes
    found = select(nodes.c.name, nodes.c.cordoned_at_s, nodes.c.cordoned_by, nodes.c.why)
    return (
        found.where(nodes.c.cordoned_at_s.is_not(None)).order_by(nodes.c.name).limit(WAITING_LIMIT)
    )


def now(connection: Connection) -> dict[str, Any]:
    """Return the page Now: `active`, `recent`, `proposals`, `failed`, `cordoned`, `evaluating`."""
    active = plain(connection, active_query())
    going = {one["run_id"]: one for one in active}
    recent = [
        one
        for one in plain(connection, runs_query(None, RECENT_LIMIT))
        if one["run_id"] not in going
    ]
    evaluating = [
        {
            name: one[name]
            for name in ("evaluation_id", "suite", "model", "started_at_s", "bound_s", "engines")
        }
        for one in plain(connection, evaluations_query(None, PAGE_ROWS))
        if one["state"] == "running"
    ]
    return {
        "active": active,
        "recent": recent,
        "proposals": proposals(connection, {one: row["attempts"] for one, row in going.items()}),
        "failed": plain(connection, failed_query()),
        "cordoned": plain(connection, cordoned_query()),
        "evaluating": evaluating,
    }


def proposals(connection: Connection, attempts: dict[str, int | None]) -> list[dict[str, Any]]:
    """Return the proposals that wait for an approval.

    Args:
        connection: a transaction that reads.
        attempts: the newest attempt of each run that goes on.
    """
    newest: dict[str, dict[str, Any]] = {}
    for kind in PROPOSALS:
        for row in plain(connection, kind_query(kind, PROPOSALS_LIMIT)):
            known = newest.get(row["run_id"])
            if known is None or row["event_id"] > known["event_id"]:
                newest[row["run_id"]] = row
    return [
        {"run_id": run_id, "at_s": row["at_s"], "text": str(row["data"].get("text", "")),
         "number": row["data"].get("number")}
        for run_id, row in newest.items()
        if row["kind"] == "proposal" and attempts.get(run_id) == row["attempt"]
    ]  # fmt: skip


def runs_page(connection: Connection, token: str) -> dict[str, Any]:
    """Return one page of all runs, newest first: `runs`, and the token `next` (None at the end).

    Raises:
        BadUse: the token is damaged.
    """
    rows = plain(connection, runs_query(key_of(token, (float, str)), PAGE_ROWS + 1))
    shown = rows[:PAGE_ROWS]
    more = len(rows) > PAGE_ROWS
    last = shown[-1] if more else None
    return {
        "runs": shown,
        "next": None if last is None else token_of(last["started_at_s"], last["run_id"]),
    }
