"""Summarize at the end of a run how far it came, at what cost, and what to do next."""

from pathlib import Path

from holdfast.core import words
from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Checkpoint, Event, Ledger

NEXT = {
    "completed": "holdfast runs report {run_id}",
    "stopped": "holdfast run --resume {run_id}",
}
"""The command to run next, by the state of the run."""
UNUSABLE = ("damaged", "incomplete")
"""The states of a checkpoint that cannot be restored."""
OTHERWISE = "holdfast explain {run_id}"


def ending(ledger: Ledger, home: Path, run_id: str) -> str:
    """Return a line with the last step, time, ETTR, newest checkpoint and next command."""
    try:
        summary = summarize(ledger, home, run_id)
        saved = ledger.checkpoints(run_id)
        rollbacks = ledger.events(run_id, kind="rolled_back")
    except HoldfastError as error:
        return f"How far the run came cannot be read: {error}"
    # After a rollback, newer checkpoints of later steps are no part of the final state.
    kept = [
        one
        for one in saved
        if one.state not in UNUSABLE
        and (one.step <= summary.final_step or not summary.steps_executed)
        and not any(_is_left(one, rollback) for rollback in rollbacks)
    ]
    newest = max(kept, key=lambda one: one.committed_at_s, default=None)
    checkpoint = "no checkpoint"
    if newest is not None:
        checkpoint = f"newest checkpoint: step {newest.step:,} in {newest.path}"
    following = NEXT.get(summary.run.state, OTHERWISE).format(run_id=run_id)
    return f"{_progress_text(summary)}; {checkpoint}. Next: {following}"


def _is_left(checkpoint: Checkpoint, rollback: Event) -> bool:
    """Return True if a rollback went to a step before this checkpoint, which was already saved."""
    to_step = rollback.data.get("to_step")
    is_later = isinstance(to_step, int) and checkpoint.step > to_step
    return is_later and checkpoint.committed_at_s <= rollback.at_s


def _progress_text(summary: RunSummary) -> str:
    took = words.duration(summary.wall_s)
    if not summary.steps_executed:
        return f"no step reported in {took}".replace(words.NBSP, " ")
    ettr = words.percent(summary.ettr)
    return f"step {summary.final_step:,} after {took}, ETTR {ettr}".replace(words.NBSP, " ")
