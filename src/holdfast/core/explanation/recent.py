"""Explain a run from the last part of its journal of steps, so that a message is sent in time."""

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
    """Return the story of a run, from the last part of the run's journal of steps.

    Do not use the costs of the whole run or of incidents that are not in `incident_ids`, because
    steps before the part that was read are missing in these costs.

    Args:
        ledger: the ledger that holds the run.
        home: `$HOLDFAST_HOME`, the folder above the run's journal of steps.
        run_id: the name of the run.
        incident_ids: the incidents that the message is about.
        journal_bytes: the number of bytes to read from the end of the journal.

    Returns:
        The story, and True if the costs of the incidents in `incident_ids` are right.

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
    """Return True if `steps` contain every step that the incidents caused to be executed again.

    An incident causes the steps above its restored step to be executed again. `steps` contain these
    steps if the first record belongs to the incident's attempt or an earlier one, and its step is
    not above the restored step.
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
