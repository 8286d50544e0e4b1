"""The evaluations: scores by task and checkpoint, progress, and the bound on the time."""

from typing import Any

from sqlalchemy import Connection

from holdfast.ui.console.queries.now import evaluations_query
from holdfast.ui.console.queries.paging import PAGE_ROWS, key_of, plain, token_of

SCORES_LIMIT = 20
_SHOWN = (
    "evaluation_id", "suite", "model", "state", "started_at_s", "ended_at_s", "makespan_s", "bound_s",
    "engines", "nodes", "run_id", "step", "outcome",
)  # fmt: skip


def evaluations_page(connection: Connection, token: str) -> dict[str, Any]:
    """Return one page of the evaluations, newest first: `evaluations`, and `next`, a token or None.

    Raises:
        BadUse: the token is damaged.
    """
    rows = plain(connection, evaluations_query(key_of(token, (float, str)), PAGE_ROWS + 1))
    shown = [
        {
            **{name: row[name] for name in _SHOWN},
            **_scores(row["scores"]),
            "failed_tasks": row["failed_tasks"],
        }
        for row in rows[:PAGE_ROWS]
    ]
    last = rows[PAGE_ROWS - 1] if len(rows) > PAGE_ROWS else None
    following = None if last is None else token_of(last["started_at_s"], last["evaluation_id"])
    return {"evaluations": shown, "next": following}


def _scores(scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the first scores of an evaluation, and the number of those left out."""
    listed = [
        {"task": task, "metric": metric, "value": found[0], "error": found[1]}
        for task, metrics in scores.items()
        for metric, found in metrics.items()
        if isinstance(found, list) and len(found) == 2
    ]
    return {"scores": listed[:SCORES_LIMIT], "scores_left_out": max(0, len(listed) - SCORES_LIMIT)}
