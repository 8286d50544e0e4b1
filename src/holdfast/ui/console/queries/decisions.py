"""The audit: the decisions of the policy and the actions of people, newest first."""

import heapq
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Select, select

from holdfast.core.ledger import schema
from holdfast.ui.console.queries.now import kind_query
from holdfast.ui.console.queries.paging import PAGE_ROWS, key_of, plain, token_of

KINDS = (
    "decision",
    "proposal",
    "observed",
    "approved",
    "withdrawn",
    "stop_asked",
    "rollback_asked",
)
_NONE_YET = 2**62
UNKNOWN = "unknown whether it was carried out: the console that began it recorded no result"


def actions_query(before: int, limit: int) -> Select[Any]:
    """Return the query for the newest actions of people, below an id."""
    table = schema.actions
    return (
        select(table)
        .where(table.c.action_id < before)
        .order_by(table.c.action_id.desc())
        .limit(limit)
    )


def decisions_page(
    connection: Connection, token: str, going: Collection[int] = ()
) -> dict[str, Any]:
    """Return one page of the audit: `decisions`, and `next`, a token or None.

    Each kind of event is read by its index and merged here, so that a late page takes no longer
    than the first.

    Args:
        connection: a transaction that reads.
        token: the token of the page; empty for the first page.
        going: the ids of the actions that this console is carrying out.

    Raises:
        BadUse: the token is damaged.
    """
    event_id, action_id = key_of(token, (int, int)) or (_NONE_YET, _NONE_YET)
    bound = max(0, min(event_id, 2**31 - 1))
    rows = [
        _decided(row)
        for kind in KINDS
        for row in plain(connection, kind_query(kind, PAGE_ROWS + 1, bound))
    ]
    rows += [
        _acted(row, is_going=row["action_id"] in going)
        for row in plain(
            connection, actions_query(max(0, min(action_id, 2**31 - 1)), PAGE_ROWS + 1)
        )
    ]
    rows = list(heapq.merge(*_by_source(rows), key=lambda row: row["at_s"], reverse=True))
    shown, more = rows[:PAGE_ROWS], len(rows) > PAGE_ROWS
    for row in shown:
        if row["from"] == "policy":
            event_id = min(event_id, row["key"])
        else:
            action_id = min(action_id, row["key"])
    return {"decisions": shown, "next": token_of(event_id, action_id) if more else None}


def _by_source(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the decisions of the policy and the actions of people, each by falling ids.

    The ids, and not the times, order each source: the next page begins below the last id that was
    shown.
    """
    return [
        sorted((row for row in rows if row["from"] == source), key=lambda row: -int(row["key"]))
        for source in ("policy", "person")
    ]


def _decided(row: dict[str, Any]) -> dict[str, Any]:
    data = _object(row["data"])
    plan, signals = _object(data.get("plan")), _object(data.get("signals"))
    what = {"proposal": "proposes", "observed": "would do", "approved": "was approved",
            "withdrawn": "was withdrawn", "stop_asked": "received a stop request",
            "rollback_asked": "received a rollback request"}  # fmt: skip
    return {
        "from": "policy",
        "key": row["event_id"],
        "at_s": row["at_s"],
        "who": str(data.get("by") or "the supervisor's policy"),
        "target": row["run_id"],
        "is_run": True,
        "what": str(plan.get("action") or what.get(row["kind"], row["kind"])),
        "why": str(
            plan.get("explanation") or data.get("text") or data.get("why") or plan.get("rule") or ""
        ),
        "mode": str(data.get("mode") or ""),
        "evidence": [str(one) for one in signals.get("looked_at") or ()],
        "lacking": [str(one) for one in signals.get("not_seen") or ()],
        "outcome": "",
    }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _acted(row: dict[str, Any], *, is_going: bool) -> dict[str, Any]:
    outcome = f"{row['state']}: {row['outcome']}" if row["outcome"] else row["state"]
    if row["state"] == "asked":
        outcome = "under way" if is_going else UNKNOWN
    return {
        "from": "person",
        "key": row["action_id"],
        "at_s": row["at_s"],
        "who": f"{row['by']} from {row['address']}",
        "target": row["target"],
        "is_run": row["what"] in ("stop", "restart", "approve", "roll-back"),
        "what": row["what"],
        "why": row["why"],
        "mode": "",
        "evidence": [f"had seen: {row['seen']}"] if row["seen"] else [],
        "lacking": [],
        "outcome": outcome,
    }
