"""The page Now as plain values: the same for HTML, JSON, the metrics and a terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.ledger import Ledger
from holdfast.ui.console.journal import newest_step
from holdfast.ui.console.queries.now import now
from holdfast.ui.console.queries.paging import LIMIT_S

StateOf = Callable[[str, str, str], str]
"""Returns a run's state (`lost` included) from its id, its state in the ledger and its host."""
TOKEN_RATES = ("tokens_per_s", "tokens_per_second", "tok_per_s")
"""The names under which a script may report its rate."""


def now_page(ledger: Ledger, home: Path, state_of: StateOf) -> dict[str, Any]:
    """Return the page Now: the runs that go on, the newest others, and what waits for a person.

    Raises:
        TooSlow: the ledger did not answer in time.
    """
    with ledger.bounded_reading(LIMIT_S) as connection:
        page = now(connection)
    complete([*page["active"], *page["recent"]], home, state_of)
    page["lost"] = [one for one in page["active"] if one["state"] == "lost"]
    return page


def complete(rows: list[dict[str, Any]], home: Path, state_of: StateOf) -> None:
    """Add to rows of runs the state by the lock, and the newest step of a run that goes on."""
    for row in rows:
        row["loss"] = row["step_s"] = row["tokens_per_s"] = row["step_at_s"] = None
        if row["state"] not in ("running", "queued"):
            continue
        row["state"] = state_of(row["run_id"], row["state"], row["host"])
        last = newest_step(home, row["run_id"])
        if last is not None:
            rate = next((last.metrics[name] for name in TOKEN_RATES if name in last.metrics), None)
            row.update(step=last.step, loss=last.loss, step_s=last.step_s, step_at_s=last.at_s,
                       tokens_per_s=rate)  # fmt: skip
