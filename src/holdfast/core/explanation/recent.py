"""Explain a run from the last part of its journal, since the time for a message is limited."""

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.core.accounting import summarize
from holdfast.core.explanation.story import RunStory, story_of
from holdfast.core.ledger import Incident, Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepRecord, read_steps


def explain_recent(
    ledger: Ledger, home: Path, run_id: str, incident_ids: Collection[int], *, journal_bytes: int
) -> tuple[RunStory, bool]:
    """Return the story of a run, and True if the costs of the incidents `incident_ids` are right.

    Do not use the costs of other incidents or of the whole run.

    Args:
        ledger: the ledger that holds the run.
        home: `$HOLDFAST_HOME`, below which the journal of steps lies.
        run_id: the name of the run.
        incident_ids: the incidents of the message.
        journal_bytes: the bytes that are read from the journal's end.

    Raises:
        NotFound: there is no such run.
        HoldfastError: the journal is damaged.
        LedgerError: the ledger cannot be read.
    """
    path = RunPaths(home, run_id).steps
    steps = list(read_steps(path, last_bytes=journal_bytes))
    is_whole = not path.exists() or path.stat().st_size <= journal_bytes
    summary = summarize(ledger, home, run_id, steps=steps)
    incidents = [
        one.incident for one in summary.incidents if one.incident.incident_id in incident_ids
    ]
    is_right = is_whole or _has_all(steps, incidents)
    return story_of(summary, ledger.events(run_id)), is_right


def _has_all(steps: Sequence[StepRecord], incidents: Sequence[Incident]) -> bool:
    """Return True if `steps` contain all steps that the incidents caused to be executed again.

    An attempt begins below its first step. So no attempt before the first record has steps above
    that record's step that an incident of a later attempt could have lost.
    """
    if not steps:
        return False
    first = steps[0]
    return all(
        one.restored_step is not None
        and first.attempt <= one.attempt
        and first.step <= one.restored_step
        for one in incidents
    )
