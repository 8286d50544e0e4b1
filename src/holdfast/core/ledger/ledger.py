"""The operations on the ledger: add, change, read back."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, func, select, true
from sqlalchemy.exc import DBAPIError

from holdfast.core.errors import BadUse, LedgerError, NotFound
from holdfast.core.ledger import schema
from holdfast.core.ledger.engine import first_line, open_engine, writing
from holdfast.core.ledger.lead_table import LeadTable
from holdfast.core.ledger.node_table import NodeTable
from holdfast.core.ledger.records import (
    HISTORY_LIMIT_BYTES,
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
)
PRIORS_KEPT = 4
"""Of each task and family: the newest."""


class Ledger(Remembered, NodeTable, LeadTable):
    """One database with the records of all runs. Safe to open in several processes at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the ledger at a SQLAlchemy URL, creating or migrating it as needed.

        Raises:
            LedgerError: it cannot be opened, or a newer Holdfast wrote it.
        """
        return cls(open_engine(url))

    @property
    def url(self) -> str:
        """The URL that `open` takes; it may hold a password."""
        return self._engine.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Let go of the database."""
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
            NotFound: there is none of this id.
        """
        if not self._update(schema.runs, schema.runs.c.run_id == run_id, changes):
            raise _no_run(run_id)

    def run(self, run_id: str) -> Run:
        """The run of this id.

        Raises:
            NotFound: there is none.
        """
        found = self._read(Run, schema.runs, schema.runs.c.run_id == run_id)
        if not found:
            raise _no_run(run_id)
        return found[0]

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return self._read(
            Run, schema.runs, order_by=(schema.runs.c.started_at_s, schema.runs.c.run_id)
        )

    def remove_run(self, run_id: str) -> None:
        """Forget a run and all that belongs to it."""
        with self._write() as connection:
            connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run_id))

    # Attempts

    def add_attempt(self, attempt: Attempt) -> None:
        """Record a start of the job."""
        self._insert(schema.attempts, asdict(attempt))

    def set_attempt(self, run_id: str, number: int, **changes: Any) -> None:
        """Change columns of an attempt.

        Raises:
            NotFound: the run has no attempt of this number.
        """
        table = schema.attempts
        if not self._update(
            table, (table.c.run_id == run_id) & (table.c.number == number), changes
        ):
            raise NotFound(
                f"Run {run_id!r} has no attempt {number}. `holdfast runs show {run_id}` lists those it has."
            )

    def attempts(self, run_id: str) -> list[Attempt]:
        """The attempts of a run, in order."""
        table = schema.attempts
        return self._read(Attempt, table, table.c.run_id == run_id, order_by=table.c.number)

    # Events

    def add_event(self, event: Event) -> None:
        """Record an event."""
        self._insert(schema.events, asdict(event))

    def add_events(self, events: Sequence[Event]) -> None:
        """Record events in one transaction, in their order."""
        with self._write() as connection:
            connection.execute(schema.events.insert(), [asdict(event) for event in events])

    def events(
        self, run_id: str, kind: str | None = None, *, kinds: Collection[str] = ()
    ) -> list[Event]:
        """The events of a run, of one kind, of several or of all, in the order they were recorded."""
        table = schema.events
        where = table.c.run_id == run_id
        if kind is not None:
            where &= table.c.kind == kind
        if kinds:
            where &= table.c.kind.in_(kinds)
        return self._read(Event, table, where, order_by=table.c.event_id)

    # Incidents

    def add_incident(self, incident: Incident) -> int:
        """Record an incident; returns its id."""
        values = asdict(incident)
        del values["incident_id"]
        with self._write() as connection:
            key = connection.execute(
                schema.incidents.insert().values(**values)
            ).inserted_primary_key
        assert key is not None
        return int(key[0])

    def set_incident(self, incident_id: int, **changes: Any) -> None:
        """Change columns of an incident.

        Raises:
            NotFound: there is none of this id.
        """
        if not self._update(
            schema.incidents, schema.incidents.c.incident_id == incident_id, changes
        ):
            raise _no_incident(incident_id)

    def incident(self, incident_id: int) -> Incident:
        """The incident of this id.

        Raises:
            NotFound: there is none.
        """
        found = self._read(
            Incident, schema.incidents, schema.incidents.c.incident_id == incident_id
        )
        if not found:
            raise _no_incident(incident_id)
        return found[0]

    def incidents(self, run_id: str | None = None) -> list[Incident]:
        """The incidents of one run or of all, in the order they were recorded."""
        table = schema.incidents
        where = None if run_id is None else table.c.run_id == run_id
        return self._read(Incident, table, where, order_by=table.c.incident_id)

    # Checkpoints

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a durable checkpoint. The same step saved again in the same attempt replaces its record."""
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

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The checkpoints of a run, in the order they became durable."""
        table = schema.checkpoints
        return self._read(
            Checkpoint, table, table.c.run_id == run_id, order_by=table.c.checkpoint_id
        )

    # Evaluations

    def add_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Record a new evaluation.

        Raises:
            BadUse: there is one of this id.
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
            NotFound: there is none of this id.
        """
        table = schema.evaluations
        if not self._update(table, table.c.evaluation_id == evaluation_id, changes):
            raise _no_evaluation(evaluation_id)

    def remove_evaluation(self, evaluation_id: str) -> None:
        """Forget an evaluation that came to nothing; does nothing where there is none of this id."""
        with self._write() as connection:
            table = schema.evaluations
            connection.execute(table.delete().where(table.c.evaluation_id == evaluation_id))

    def evaluation(self, evaluation_id: str) -> EvaluationRecord:
        """The evaluation of this id.

        Raises:
            NotFound: there is none.
        """
        table = schema.evaluations
        found = self._read(EvaluationRecord, table, table.c.evaluation_id == evaluation_id)
        if not found:
            raise _no_evaluation(evaluation_id)
        return found[0]

    def evaluations(self, **equal: str | int) -> list[EvaluationRecord]:
        """The evaluations, newest first; only those whose columns have these values (`suite="mine"`, `run_id="r"`)."""
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
        """Record what samples cost, in one transaction; of each task and family the newest few are kept."""
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
        """The newest prior of a family's every task, by harness and task."""
        table = schema.priors
        newest = (
            select(func.max(table.c.prior_id))
            .where(table.c.family == family)
            .group_by(table.c.harness, table.c.task)
        )
        found = self._read(Prior, table, table.c.prior_id.in_(newest))
        return {(prior.harness, prior.task): prior for prior in found}

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """One transaction that writes."""
        with self._as_ledger_error("written"), writing(self._engine).begin() as connection:
            yield connection

    @contextmanager
    def _as_ledger_error(self, verb: str) -> Iterator[None]:
        # A full disk or a ledger locked for too long is the user's to mend: one sentence, no traceback.
        try:
            yield
        except DBAPIError as error:
            raise LedgerError(
                f"The ledger {self._engine.url} cannot be {verb}: {first_line(error)}. "
                "See that its disk has room and that nothing else holds it locked, then try again."
            ) from error

    def _insert(self, table: Table, values: dict[str, Any]) -> None:
        with self._write() as connection:
            connection.execute(table.insert().values(**values))

    def _update(self, table: Table, where: Any, changes: dict[str, Any]) -> bool:
        """Whether there was a row to change."""
        with self._write() as connection:
            return connection.execute(table.update().where(where).values(**changes)).rowcount > 0

    def _read(
        self, record: type[Record], table: Table, where: Any = None, order_by: Any = None
    ) -> list[Record]:
        # A table's own key (event_id, checkpoint_id) is for order only; the records do not carry it.
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
