"""Add, change and read the ledger's records."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, func, select, true
from sqlalchemy.exc import DBAPIError

from holdfast.core.errors import BadUse, LedgerError, LedgerUnreachable, NotFound
from holdfast.core.ledger import schema
from holdfast.core.ledger.action_table import ActionTable
from holdfast.core.ledger.engine import first_line, is_unreachable, open_engine, writing
from holdfast.core.ledger.lead_table import LeadTable
from holdfast.core.ledger.node_table import NodeTable
from holdfast.core.ledger.reading import bounded_reading
from holdfast.core.ledger.records import (
    HISTORY_LIMIT_BYTES,
    ActionRecord,
    Attempt,
    Checkpoint,
    EvaluationRecord,
    Event,
    GoodRun,
    Incident,
    Lead,
    LearnedRule,
    MeetingPlace,
    Memory,
    NodeRecord,
    Prior,
    Run,
)
from holdfast.core.ledger.remembered import Remembered

Record = TypeVar(
    "Record",
    Run,
    Attempt,
    Event,
    Incident,
    Checkpoint,
    EvaluationRecord,
    Prior,
    Memory,
    LearnedRule,
    GoodRun,
    NodeRecord,
    Lead,
    MeetingPlace,
    ActionRecord,
)
PRIORS_KEPT = 4
"""The number of priors that are kept for each task and family; older ones are deleted."""


class Ledger(Remembered, NodeTable, LeadTable, ActionTable):
    """One database with the records of all runs; several processes may open it at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._may_be_recorded = False
        """True to look for each record before the record is added."""

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the ledger at a SQLAlchemy URL, creating or migrating it as needed.

        Raises:
            LedgerError: the ledger cannot be opened, or a newer Holdfast wrote it.
        """
        return cls(open_engine(url))

    @property
    def url(self) -> str:
        """The URL to pass to `open`; it may contain a password."""
        return self._engine.url.render_as_string(hide_password=False)

    def repeating(self) -> Self:
        """Return the same ledger, for repeating an operation that failed with `LedgerUnreachable`.

        The failed attempt may have been recorded. So `add_attempt`, `add_events`, `add_event` and
        `add_incident` of the returned ledger first look for the same record, and do not add a
        second one.
        """
        again = type(self)(self._engine)
        again._may_be_recorded = True
        return again

    def close(self) -> None:
        """Close all connections to the database."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Runs

    def add_run(self, run: Run) -> None:
        """Record a new run."""
        self._insert(schema.runs, asdict(run))

    def set_run(self, run_id: str, **changes: Any) -> None:
        """Change columns of a run.

        Raises:
            NotFound: the ledger has no run with this id.
        """
        if not self._update(schema.runs, schema.runs.c.run_id == run_id, changes):
            raise _no_run(run_id)

    def run(self, run_id: str) -> Run:
        """Return the run with this id.

        Raises:
            NotFound: the ledger has no run with this id.
        """
        found = self._read(Run, schema.runs, schema.runs.c.run_id == run_id)
        if not found:
            raise _no_run(run_id)
        return found[0]

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return self._read(
            Run, schema.runs, order_by=(schema.runs.c.started_at_s, schema.runs.c.run_id)
        )

    def newest_run(self) -> Run:
        """Return the run that started last.

        Raises:
            NotFound: the ledger has no run.
        """
        runs = self.runs()
        if not runs:
            raise NotFound("There is no run yet. Start one: holdfast run -- python train.py")
        return runs[-1]

    def remove_run(self, run_id: str) -> None:
        """Delete a run and all records that belong to the run."""
        with self._write() as connection:
            connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run_id))

    # Attempts

    def add_attempt(self, attempt: Attempt) -> None:
        """Record an attempt, which is one start of the job."""
        if self._may_be_recorded and attempt in self.attempts(attempt.run_id):
            return
        self._insert(schema.attempts, asdict(attempt))

    def set_attempt(self, run_id: str, number: int, **changes: Any) -> None:
        """Change columns of an attempt.

        Raises:
            NotFound: the run has no attempt with this number.
        """
        table = schema.attempts
        if not self._update(
            table, (table.c.run_id == run_id) & (table.c.number == number), changes
        ):
            raise NotFound(
                f"Run {run_id!r} has no attempt {number}. `holdfast runs show {run_id}` lists those it has."
            )

    def attempts(self, run_id: str) -> list[Attempt]:
        """Return the attempts of a run, in order."""
        table = schema.attempts
        return self._read(Attempt, table, table.c.run_id == run_id, order_by=table.c.number)

    # Events

    def add_event(self, event: Event) -> None:
        """Record an event."""
        self.add_events([event])

    def add_events(self, events: Sequence[Event]) -> None:
        """Record events in one transaction, in their order."""
        if self._may_be_recorded:
            # One transaction has recorded either all of the events or none.
            first = replace(events[0], data=json.loads(json.dumps(events[0].data)))
            if first in self.events(first.run_id, first.kind):
                return
        with self._write() as connection:
            connection.execute(schema.events.insert(), [asdict(event) for event in events])

    def events(
        self, run_id: str, kind: str | None = None, *, kinds: Collection[str] = ()
    ) -> list[Event]:
        """Return the events of a run in the order in which they were recorded.

        `kind` selects one kind of event, and `kinds` several. Without either, all events are
        returned.
        """
        table = schema.events
        where = table.c.run_id == run_id
        if kind is not None:
            where &= table.c.kind == kind
        if kinds:
            where &= table.c.kind.in_(kinds)
        return self._read(Event, table, where, order_by=table.c.event_id)

    # Incidents

    def add_incident(self, incident: Incident) -> int:
        """Record an incident, and return the incident's new id."""
        values = asdict(incident)
        del values["incident_id"]
        if self._may_be_recorded:
            for one in self.incidents(incident.run_id):
                if replace(one, incident_id=None) == incident:
                    assert one.incident_id is not None
                    return one.incident_id
        with self._write() as connection:
            key = connection.execute(
                schema.incidents.insert().values(**values)
            ).inserted_primary_key
        assert key is not None
        return int(key[0])

    def set_incident(self, incident_id: int, **changes: Any) -> None:
        """Change columns of an incident.

        Raises:
            NotFound: the ledger has no incident with this id.
        """
        if not self._update(
            schema.incidents, schema.incidents.c.incident_id == incident_id, changes
        ):
            raise _no_incident(incident_id)

    def incident(self, incident_id: int) -> Incident:
        """Return the incident with this id.

        Raises:
            NotFound: the ledger has no incident with this id.
        """
        found = self._read(
            Incident, schema.incidents, schema.incidents.c.incident_id == incident_id
        )
        if not found:
            raise _no_incident(incident_id)
        return found[0]

    def incidents(self, run_id: str | None = None) -> list[Incident]:
        """Return the incidents of one run, or of all runs, in the order of their recording."""
        table = schema.incidents
        where = None if run_id is None else table.c.run_id == run_id
        return self._read(Incident, table, where, order_by=table.c.incident_id)

    # Checkpoints

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a durable checkpoint; replace a record with the same attempt, step and path."""
        table = schema.checkpoints
        with self._write() as connection:
            connection.execute(
                table.delete().where(
                    table.c.run_id == checkpoint.run_id,
                    table.c.attempt == checkpoint.attempt,
                    table.c.step == checkpoint.step,
                    table.c.path == checkpoint.path,
                )
            )
            connection.execute(table.insert().values(**asdict(checkpoint)))

    def set_checkpoint_healthy(self, run_id: str, path: str) -> None:
        """Record that the training went well after a checkpoint; a deleted one is no error."""
        table = schema.checkpoints
        here = (table.c.run_id == run_id) & (table.c.path == path)
        self._update(table, here, {"state": "healthy"})

    def abandon_checkpoints(self, run_id: str, *, after_step: int) -> None:
        """Record that the training has gone back to a step: no later checkpoint is healthy now."""
        table = schema.checkpoints
        later = (table.c.run_id == run_id) & (table.c.step > after_step)
        self._update(table, later & (table.c.state == "healthy"), {"state": "written"})

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, in the order in which they were recorded."""
        table = schema.checkpoints
        return self._read(
            Checkpoint, table, table.c.run_id == run_id, order_by=table.c.checkpoint_id
        )

    # Evaluations

    def add_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Record a new evaluation.

        Raises:
            BadUse: the ledger already has an evaluation with this id.
        """
        table = schema.evaluations
        with self._write() as connection:
            same = select(table.c.evaluation_id).where(
                table.c.evaluation_id == evaluation.evaluation_id
            )
            if connection.execute(same).first() is not None:
                raise BadUse(
                    f"There is already an evaluation {evaluation.evaluation_id!r}. Choose another --id, or go on with "
                    f"it: holdfast eval resume {evaluation.evaluation_id}"
                )
            connection.execute(table.insert().values(**asdict(evaluation)))

    def set_evaluation(self, evaluation_id: str, **changes: Any) -> None:
        """Change columns of an evaluation.

        Raises:
            NotFound: the ledger has no evaluation with this id.
        """
        table = schema.evaluations
        if not self._update(table, table.c.evaluation_id == evaluation_id, changes):
            raise _no_evaluation(evaluation_id)

    def remove_evaluation(self, evaluation_id: str) -> None:
        """Delete an evaluation; do nothing if the ledger has no evaluation with this id."""
        with self._write() as connection:
            table = schema.evaluations
            connection.execute(table.delete().where(table.c.evaluation_id == evaluation_id))

    def evaluation(self, evaluation_id: str) -> EvaluationRecord:
        """Return the evaluation with this id.

        Raises:
            NotFound: the ledger has no evaluation with this id.
        """
        table = schema.evaluations
        found = self._read(EvaluationRecord, table, table.c.evaluation_id == evaluation_id)
        if not found:
            raise _no_evaluation(evaluation_id)
        return found[0]

    def evaluations(self, **equal: str | int) -> list[EvaluationRecord]:
        """Return the evaluations, newest first.

        Args:
            equal: columns with the values that they must have, such as `suite="mine"`; without any,
                all evaluations are returned.
        """
        table = schema.evaluations
        where = and_(true(), *(table.c[name] == value for name, value in equal.items()))
        return self._read(
            EvaluationRecord,
            table,
            where,
            order_by=(table.c.started_at_s.desc(), table.c.evaluation_id.desc()),
        )

    # Priors

    def add_priors(self, priors: Sequence[Prior]) -> None:
        """Record the measured costs of samples in one transaction.

        For each task and family, only the newest `PRIORS_KEPT` priors are kept.
        """
        table = schema.priors
        with self._write() as connection:
            for prior in priors:
                assert len(prior.history) <= HISTORY_LIMIT_BYTES, (
                    "whoever packs a history bounds it"
                )
                connection.execute(table.insert().values(**asdict(prior)))
                same = and_(
                    table.c.family == prior.family,
                    table.c.harness == prior.harness,
                    table.c.task == prior.task,
                )
                newest = (
                    select(table.c.prior_id)
                    .where(same)
                    .order_by(table.c.prior_id.desc())
                    .limit(PRIORS_KEPT)
                )
                kept = [row.prior_id for row in connection.execute(newest)]
                connection.execute(table.delete().where(same, table.c.prior_id < min(kept)))

    def latest_priors(self, family: str) -> dict[tuple[str, str], Prior]:
        """Return the newest prior of each task of a family; the key is the harness and the task."""
        table = schema.priors
        newest = (
            select(func.max(table.c.prior_id))
            .where(table.c.family == family)
            .group_by(table.c.harness, table.c.task)
        )
        found = self._read(Prior, table, table.c.prior_id.in_(newest))
        return {(prior.harness, prior.task): prior for prior in found}

    @contextmanager
    def bounded_reading(self, limit_s: float) -> Iterator[Connection]:
        """Open one transaction that only reads, with a time limit on its queries in seconds.

        Raises:
            TooSlow: a query took longer than the limit, and the database ended the query.
            LedgerError: the ledger cannot be read.
        """
        with (
            self._as_ledger_error("read"),
            bounded_reading(self._engine, limit_s) as connection,
        ):
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """Open one transaction that writes."""
        with self._as_ledger_error("written"), writing(self._engine).begin() as connection:
            yield connection

    @contextmanager
    def _as_ledger_error(self, verb: str) -> Iterator[None]:
        # The user can mend a full disk or a long lock; so the error is one sentence, no traceback.
        try:
            yield
        except DBAPIError as error:
            if is_unreachable(self._engine, error):
                raise LedgerUnreachable(
                    f"The ledger {self._engine.url} cannot be reached: {first_line(error)}. "
                    "Check that its server runs and that this host can reach the server, then try again."
                ) from error
            raise LedgerError(
                f"The ledger {self._engine.url} cannot be {verb}: {first_line(error)}. "
                "Check that its disk has room and that no other process locks it, then try again."
            ) from error

    def _insert(self, table: Table, values: dict[str, Any]) -> None:
        with self._write() as connection:
            connection.execute(table.insert().values(**values))

    def _update(self, table: Table, where: Any, changes: dict[str, Any]) -> bool:
        """Change the selected rows; return False if no row was selected."""
        with self._write() as connection:
            return connection.execute(table.update().where(where).values(**changes)).rowcount > 0

    def _read(
        self, record: type[Record], table: Table, where: Any = None, order_by: Any = None
    ) -> list[Record]:
        # The records lack a table's own key (event_id, checkpoint_id), which is for order only.
        columns = [table.c[name] for name in record.__dataclass_fields__]
        query = select(*columns)
        if where is not None:
            query = query.where(where)
        if order_by is not None:
            query = query.order_by(*order_by if isinstance(order_by, tuple) else (order_by,))
        with self._as_ledger_error("read"), self._engine.connect() as connection:
            return [record(**row) for row in connection.execute(query).mappings()]


def _no_run(run_id: str) -> NotFound:
    return NotFound(f"There is no run {run_id!r}. `holdfast runs ls` lists those there are.")


def _no_incident(incident_id: int) -> NotFound:
    return NotFound(
        f"There is no incident {incident_id}. `holdfast incidents ls` lists those there are."
    )


def _no_evaluation(evaluation_id: str) -> NotFound:
    return NotFound(
        f"There is no evaluation {evaluation_id!r}. `holdfast eval ls` lists those there are."
    )
