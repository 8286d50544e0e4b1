"""One run: its newest records, bounded, and the chain of its incidents."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from holdfast.core.accounting import RunSummary
from holdfast.core.accounting.summary import account
from holdfast.core.errors import NotFound
from holdfast.core.explanation import RunStory, story_of
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Run, schema
from holdfast.core.ledger.records import Memory
from holdfast.core.telemetry import StepRecord
from holdfast.ui.console.queries.paging import records

ATTEMPTS_LIMIT = 500
EVENTS_LIMIT = 2000
INCIDENTS_LIMIT = 200
CHECKPOINTS_LIMIT = 200


class RunRecords:
    """The newest records of one run, as many as a page may read."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        """Read the records.

        Raises:
            NotFound: the ledger has no such run.
        """
        runs, attempts, events = schema.runs, schema.attempts, schema.events
        incidents, checkpoints, leads = schema.incidents, schema.checkpoints, schema.leads
        found, _ = records(
            connection, Run, runs, runs.c.run_id == run_id, newest_by=runs.c.run_id, limit=1
        )
        if not found:
            raise NotFound(f"There is no run {run_id!r}. The page Runs lists those there are.")
        self.run = found[0]
        self.attempts, whole_1 = records(
            connection, Attempt, attempts, attempts.c.run_id == run_id,
            newest_by=attempts.c.number, limit=ATTEMPTS_LIMIT,
        )  # fmt: skip
        self.events, whole_2 = records(
            connection, Event, events, events.c.run_id == run_id,
            newest_by=events.c.event_id, limit=EVENTS_LIMIT,
        )  # fmt: skip
        self.incidents, whole_3 = records(
            connection, Incident, incidents, incidents.c.run_id == run_id,
            newest_by=incidents.c.incident_id, limit=INCIDENTS_LIMIT,
        )  # fmt: skip
        self.checkpoints, whole_4 = records(
            connection, Checkpoint, checkpoints, checkpoints.c.run_id == run_id,
            newest_by=checkpoints.c.checkpoint_id, limit=CHECKPOINTS_LIMIT,
        )  # fmt: skip
        self.is_whole = whole_1 and whole_2 and whole_3 and whole_4
        """True if the run has no older records."""
        generation = select(leads.c.generation).where(leads.c.run_id == run_id)
        self.generation = int(connection.execute(generation).scalar() or 0)
        self.verdicts = _verdicts(connection, [one.incident_id for one in self.incidents])

    def summary(self, steps: Sequence[StepRecord]) -> RunSummary:
        """Return the accounts of the run, from these records and the journal's newest steps."""
        return account(
            run=self.run, attempts=self.attempts, events=self.events, incidents=self.incidents,
            checkpoints=self.checkpoints, steps=steps,
        )  # fmt: skip

    def story(self, summary: RunSummary) -> RunStory:
        """Return the chain of the run."""
        return story_of(summary, self.events)

    @property
    def seen(self) -> str:
        """The state behind a person's action: supervisor generation, newest attempt, run state."""
        newest = self.attempts[-1].number if self.attempts else 0
        return f"{self.generation}.{newest}.{self.run.state}"

    @property
    def proposal(self) -> dict[str, Any] | None:
        """The data of the proposal that waits for an approval; None without one."""
        proposals = [
            one for one in self.events if one.kind in ("proposal", "approved", "withdrawn")
        ]
        newest = self.attempts[-1].number if self.attempts else 0
        is_open = bool(proposals) and (proposals[-1].kind, proposals[-1].attempt) == (
            "proposal",
            newest,
        )
        return proposals[-1].data if is_open and self.run.state == "running" else None


def _verdicts(connection: Connection, incident_ids: list[int | None]) -> dict[int, Memory]:
    """Return the memories of incidents, with the verdicts of people, by incident."""
    table = schema.memories
    found, _ = records(
        connection, Memory, table, table.c.incident_id.in_(incident_ids),
        newest_by=table.c.memory_id, limit=INCIDENTS_LIMIT,
    )  # fmt: skip
    return {one.incident_id: one for one in found if one.incident_id is not None}


def run_of_incident(connection: Connection, incident_id: int) -> str:
    """Return the id of the run of an incident.

    Raises:
        NotFound: the ledger has no such incident.
    """
    table = schema.incidents
    query = select(table.c.run_id).where(table.c.incident_id == incident_id)
    found = connection.execute(query).scalar()
    if found is None:
        raise NotFound(
            f"There is no incident {incident_id}. The pages of the runs list those there are."
        )
    return str(found)


def seen_of_verdict(memory: Memory | None) -> str:
    """Return the state of an incident that a person judges: the verdict so far."""
    return "" if memory is None or not memory.verdict else f"{memory.verdict} {memory.judged_at_s}"
