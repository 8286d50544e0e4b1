"""Record the history of a run in the ledger and in a journal of steps.

If a record cannot be written, for example because the disk is full or the database is locked, the
recorder reports the error and drops the record. The run continues as if the record had been
written, since a gap in the history must not end the training.

A ledger that does not answer must not block the supervisor's event loop. So a thread writes the
records of a healthy job. If something must be recorded before an action, the loop waits for a
limited time.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.failure_history import FailureHistory
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger, LedgerThread
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.core.whole import whole_number
from holdfast.recover import policy
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.detectors.hang import Frozen
from holdfast.recover.skipping.plan import Skip, Skipping

MOST = 2**53
"""The largest step, and the largest number of bytes, of a checkpoint that can be recorded."""
LEAVE_OUT = "leave_out"
"""The kind of the event that records batches which all later attempts leave out."""
MISSED = "rollback_missed"
"""The kind of the event that records a rollback without effect."""

P = ParamSpec("P")
R = TypeVar("R")


def _or_complain(
    write: "Callable[Concatenate[Recorder, P], R]",
) -> "Callable[Concatenate[Recorder, P], R | None]":
    @functools.wraps(write)
    def written(self: "Recorder", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return write(self, *args, **kwargs)
        except (HoldfastError, OSError) as error:
            self.complain(str(error))
            return None

    return written


@dataclass(frozen=True)
class RecordedLaunch:
    """The launchers of one attempt, or of several attempts below the same launchers."""

    attempt: int
    """The attempt that started the launchers."""
    nodes: dict[str, str]
    """The ids and the names of the nodes with the launchers."""


class Recorder:
    """Write the history of one run; it has no other writer while it is supervised."""

    def __init__(
        self, paths: RunPaths, ledger: Ledger, clock: Clock, complain: Callable[[str], None]
    ) -> None:
        self._paths = paths
        self._run_id = paths.run_id
        self._thread = LedgerThread(ledger)
        self._ledger = self._thread.ledger
        self._clock = clock
        self.complain = complain
        self._journal = StepJournal(paths.steps)
        self._last_step = self._journal.last()
        """The last step recorded by an earlier supervisor; None once a later step is recorded."""
        self.attempt = max((one.number for one in ledger.attempts(self._run_id)), default=0)
        """The number of the newest attempt, 0 before the first."""
        self.any_step = any(
            one.first_step_at_s is not None for one in ledger.attempts(self._run_id)
        )
        """True once any attempt of the run has reported a step."""
        self.checkpoint_step: int | None = None
        """The step of the newest checkpoint that the present attempt made durable."""
        self._incident_ids: list[int] = []
        """The id of the last incident, once the ledger has recorded the incident."""
        self._newest_checkpoint: tuple[int, str] | None = None
        """The attempt and the path of the checkpoint that was recorded last."""
        for one in ledger.checkpoints(self._run_id):
            self._newest_checkpoint = one.attempt, one.path
            if one.attempt == self.attempt:
                self.checkpoint_step = one.step

        self._waiting: list[Event] = []
        """The events that are not written yet."""
        self.skipping = Skipping()
        """The batches that the run's attempts leave out from now on."""
        for skip in self._recorded_skips().values():
            self.skipping = self.skipping.with_skip(skip)

    def start_thread(self) -> None:
        """Use the ledger only in a thread from now on (see `core.ledger.ledger_thread`)."""
        self._thread.start()

    @property
    def ledger(self) -> Ledger:
        """The ledger, for the other parts of the supervisor's event loop."""
        return self._ledger

    def close(self) -> None:
        """Write the waiting events and close the journal; complain if records are missing."""
        self.flush()
        self._thread.close()
        self._complain_of_earlier()
        self._journal.close()

    def event(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event before this method returns, if the ledger answers in time."""
        self.event_soon(kind, data, rank)
        self._write_events()

    @_or_complain
    def _write_events(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._ledger.add_events(waiting)

    def event_soon(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event at the next `flush`; thousands of ranks may end at the same time.

        The caller does not wait for the ledger.
        """
        now_s = self._clock.now_s()
        event = Event(
            run_id=self._run_id, attempt=self.attempt, at_s=now_s, kind=kind, rank=rank, data=data
        )
        self._waiting.append(event)

    @_or_complain
    def flush(self) -> None:
        """Write the waiting events in one transaction, in the ledger's thread.

        Earlier failures are reported.
        """
        self._complain_of_earlier()
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._thread.later(lambda ledger: ledger.add_events(waiting))

    def _complain_of_earlier(self) -> None:
        for error in self._thread.take_errors():
            self.complain(error)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run_id

    def events(self, *kinds: str) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the kind, attempt and data of the run's events with the given kinds, in order.

        If the events cannot be read, the error is reported and the list is empty.
        """
        self.flush()
        try:
            found = self._ledger.events(self._run_id, kinds=kinds)
        except HoldfastError as error:
            self.complain(str(error))
            return []
        return [(one.kind, one.attempt, one.data) for one in found]

    @_or_complain
    def attempt_began(self, number: int) -> None:
        """Record the start of an attempt."""
        self.attempt, self.checkpoint_step = number, None
        self._ledger.add_attempt(
            Attempt(run_id=self._run_id, number=number, started_at_s=self._clock.now_s())
        )

    @_or_complain
    def first_step(self, start_step: int, at_s: float) -> None:
        """Record when the attempt completed its first step, and the step from which it started."""
        self.any_step = True
        number, changes = self.attempt, {"start_step": start_step, "first_step_at_s": at_s}
        self._thread.later(lambda ledger: ledger.set_attempt(self._run_id, number, **changes))

    @_or_complain
    def step(self, record: StepRecord) -> None:
        """Record a completed step, unless an earlier supervisor has recorded it."""
        last = self._last_step
        if last is not None and (last.attempt, last.rank) == (record.attempt, record.rank):
            if record.step <= last.step:
                return
            self._last_step = None
        self._journal.append(record)

    @_or_complain
    def checkpoint(self, data: dict[str, Any]) -> None:
        """Record a durable checkpoint; `data` is the data of its `checkpoint` event."""
        if self._newest_checkpoint == (self.attempt, str(data["path"])):
            return  # an earlier supervisor has recorded it
        checkpoint = Checkpoint(
            run_id=self._run_id,
            attempt=self.attempt,
            step=int(data["step"]),
            path=str(data["path"]),
            state="written",
            size_bytes=int(data["size_bytes"]),
            stall_s=float(data["stall_s"]),
            committed_at_s=self._clock.now_s(),
        )
        if not 0 <= checkpoint.step <= MOST or not 0 <= checkpoint.size_bytes <= MOST:
            raise ValueError("a checkpoint of an impossible step or size")
        self.checkpoint_step = checkpoint.step
        self._newest_checkpoint = checkpoint.attempt, checkpoint.path
        self._thread.later(lambda ledger: ledger.add_checkpoint(checkpoint))

    @_or_complain
    def healthy(self, path: Path) -> None:
        """Record that a checkpoint is healthy."""
        self._thread.later(lambda ledger: ledger.set_checkpoint_healthy(self._run_id, str(path)))

    @_or_complain
    def rolled_back(self, data: dict[str, Any], to_step: int | None) -> None:
        """Record that the job goes back to a checkpoint; None if there is none."""
        self.event("rolled_back", {**data, "to_step": to_step})
        if to_step is not None:
            self._thread.later(
                lambda ledger: ledger.abandon_checkpoints(self._run_id, after_step=to_step)
            )

    @_or_complain
    def rolled_back_before(self) -> tuple[int, int] | None:
        """Return the rollback between the present attempt and the attempt before; None without one.

        Returns:
            The step of the checkpoint that the rollback left as the newest, and the last step of
            the attempt before.
        """
        before = self.attempt - 1
        done = [data for _, attempt, data in self.events("rolled_back") if attempt == before]
        to_step = whole_number(done[-1].get("to_step")) if done else None
        if to_step is None:
            return None
        reached = [one.last_step or 0 for one in self.attempts() if one.number == before]
        return to_step, max(to_step, *reached)

    @_or_complain
    def observed(self, lines: list[str]) -> None:
        """Append observations of the supervisor to a log, so that a diagnosis can cite them."""
        with self._paths.observer_log(self.attempt).open("a", encoding="utf-8") as log:
            log.writelines(lines)

    @_or_complain
    def attempt_ended(self, *, outcome: str, last_step: int | None) -> None:
        """Record the end of the attempt, when all processes of the job are gone."""
        now_s = self._clock.now_s()
        self._ledger.set_attempt(
            self._run_id, self.attempt, ended_at_s=now_s, outcome=outcome, last_step=last_step
        )

    @_or_complain
    def incident(self, incident: Incident) -> int:
        """Record a diagnosed failure; return its id, or None if the ledger does not answer in time."""
        ids = self._incident_ids = []

        def add(ledger: Ledger) -> int:
            ids.append(ledger.add_incident(incident))
            return ids[0]

        return self._thread.call(add)

    @_or_complain
    def resolved(self, incident_id: int | None, resolve: policy.Resolve) -> None:
        """Record the action on an incident; without an id, on the last incident."""
        changes = {"action": resolve.action, "explanation": resolve.explanation}
        self._thread.call(self._change_of_incident(incident_id, changes))

    @_or_complain
    def resumed(self, incident_id: int | None, at_s: float, restored_step: int) -> None:
        """Record the job's next step after an incident; without an id, after the last incident."""
        changes = {"resumed_at_s": at_s, "restored_step": restored_step}
        self._thread.call(self._change_of_incident(incident_id, changes))

    def _change_of_incident(
        self, incident_id: int | None, changes: dict[str, Any]
    ) -> Callable[[Ledger], None]:
        ids = self._incident_ids if incident_id is None else [incident_id]

        def change(ledger: Ledger) -> None:
            # The thread has added the incident before this change. If there is no id, the ledger
            # has refused the incident, and the refusal was reported.
            for one in ids:
                ledger.set_incident(one, **changes)

        return change

    @_or_complain
    def run_ended(self, *, state: str, exit_code: int, outcome: str) -> None:
        """Record the end of the run."""
        now_s = self._clock.now_s()
        self._ledger.set_run(
            self._run_id, state=state, ended_at_s=now_s, exit_code=exit_code, outcome=outcome
        )

    @_or_complain
    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the last durable checkpoint that no rollback has abandoned; None if there is none."""
        found = self._ledger.checkpoints(self._run_id)
        for event in self._ledger.events(self._run_id, kind="rolled_back"):
            to_step = whole_number(event.data.get("to_step"))
            if to_step is not None:
                found = [one for one in found if one.attempt > event.attempt or one.step <= to_step]
        return found[-1] if found else None

    @property
    def reached(self) -> int | None:
        """The step of the newest checkpoint, or else the highest step; None if there is neither."""
        newest = self.newest_checkpoint()
        if newest is not None:
            return newest.step
        steps = [one.last_step for one in self._ledger.attempts(self._run_id)]
        return max((step for step in steps if step is not None), default=None)

    @_or_complain
    def checkpoint_folders(self) -> set[Path]:
        """Return the folders into which the run has saved."""
        return {Path(one.path).parent for one in self._ledger.checkpoints(self._run_id)}

    @_or_complain
    def failures(self) -> FailureHistory:
        """Return the failures of the job so far."""
        return FailureHistory.of_run(
            self._ledger.attempts(self._run_id), self._ledger.incidents(self._run_id)
        )

    @_or_complain
    def launched(self, nodes: Mapping[str, str]) -> None:
        """Record the ids and the names of the nodes with the attempt's launchers, by node rank."""
        self.event("launched", {"nodes": dict(nodes)})

    def running_launch(self) -> "RecordedLaunch | None":
        """Return the launch below which the newest attempt runs; None if no attempt runs."""
        attempts = self._ledger.attempts(self._run_id)
        launches = self._ledger.events(self._run_id, kind="launched")
        if not attempts or attempts[-1].outcome != "running" or not launches:
            return None
        last = launches[-1]
        return RecordedLaunch(attempt=last.attempt, nodes=dict(last.data["nodes"]))

    def leave_out(self, skip: Skip) -> None:
        """Leave out a range of batches in all later attempts, also under later supervisors."""
        self.skipping = self.skipping.with_skip(skip)
        self.event(LEAVE_OUT, asdict(skip))

    def _recorded_skips(self) -> dict[int, Skip]:
        """Return the recorded ranges of batches to leave out, by the attempt of each decision."""
        found = {}
        for one in self._ledger.events(self._run_id, kind=LEAVE_OUT):
            try:
                found[one.attempt] = Skip.of_json(one.data)
            except (KeyError, TypeError, ValueError) as error:
                self.complain(f"A record of batches to leave out is ignored: {error}.")
        return found

    def attempts(self) -> list[Attempt]:
        """Return the attempts of the run.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        return self._ledger.attempts(self._run_id)

    @_or_complain
    def classified(self, incident_id: int, found: Mapping[str, Any], because: str) -> None:
        """Add the class of a broken loss to its incident."""
        incident = self._ledger.incident(incident_id)
        explanation = incident.explanation
        if because not in explanation:
            explanation = f"{explanation} {because}".strip()
        self._ledger.set_incident(
            incident_id,
            diagnosis={**incident.diagnosis, "anomaly": dict(found)},
            explanation=explanation,
        )

    @_or_complain
    def ends(self, frozen: Frozen | None, anomaly: Anomaly | None) -> None:
        """Record why the supervisor ends the job, so that the next supervisor can continue."""
        data = {
            "frozen": None if frozen is None else asdict(frozen),
            "anomaly": None if anomaly is None else anomaly.to_json(),
        }
        self.event("ending", data)

    def ending(self) -> tuple[Frozen | None, Anomaly | None]:
        """Return why an earlier supervisor ended the newest attempt, if it did."""
        ended = [
            one.data
            for one in self._ledger.events(self._run_id, kind="ending")
            if one.attempt == self.attempt
        ]
        if not ended or any(one.attempt == self.attempt for one in self._incidents()):
            return None, None
        frozen, anomaly = ended[-1]["frozen"], ended[-1]["anomaly"]
        return (
            None if frozen is None else Frozen(**frozen),
            None if anomaly is None else Anomaly.of_json(anomaly),
        )

    def recorded_end(self) -> tuple[str, int, str] | None:
        """Return the recorded end of the run: state, exit code and outcome; None if it still runs."""
        run = self._ledger.run(self._run_id)
        if run.state == "running":
            return None
        code = 1 if run.exit_code is None else run.exit_code
        return run.state, code, run.outcome

    @_or_complain
    def close_lost_attempts(self) -> None:
        """Record the ends of attempts whose supervisor ended before it could record them."""
        now_s = self._clock.now_s()
        for attempt in self._ledger.attempts(self._run_id):
            if attempt.outcome != "running":
                continue
            self._ledger.set_attempt(
                self._run_id, attempt.number, outcome="failed", ended_at_s=now_s
            )
            lost = {"detail": "the supervisor ended before the attempt did"}
            self._ledger.add_event(
                Event(
                    run_id=self._run_id,
                    attempt=attempt.number,
                    at_s=now_s,
                    kind="supervisor_lost",
                    data=lost,
                )
            )

    @property
    def start_step(self) -> int | None:
        """The step from which the newest attempt started; None before its first step."""
        attempts = self._ledger.attempts(self._run_id)
        return attempts[-1].start_step if attempts else None

    def _incidents(self) -> list[Incident]:
        """Return the incidents since a person last started the run."""
        # Earlier incidents are left out, since that person has looked at them. Attempts are
        # compared instead of times, since the wall clock may have been set meanwhile.
        begun = [one.attempt for one in self._ledger.events(self._run_id, kind="begun")]
        since = max(begun, default=0)
        return [one for one in self._ledger.incidents(self._run_id) if one.attempt > since]

    @_or_complain
    def open_incident(self) -> Incident | None:
        """Return the last incident if the job has completed no step since then; else None."""
        incidents = self._incidents()
        is_open = incidents and incidents[-1].resumed_at_s is None
        return incidents[-1] if is_open else None

    def remembered(self, limits: policy.RestartLimits) -> policy.State:
        """Rebuild the state of the policy, with roots and gains, from a dead supervisor's records.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        since_epoch_s = self._clock.now_s() - self._clock.monotonic_s()
        attempts = {one.number: one for one in self._ledger.attempts(self._run_id)}
        checkpoints = self._ledger.checkpoints(self._run_id)
        restored = {
            event.attempt: whole_number(event.data.get("step"))
            for event in self._ledger.events(self._run_id, kind="restored")
        }
        skips = self._recorded_skips()
        replays = {attempt for _, attempt, _ in self.events("replay")}
        state = policy.State()
        for incident in self._incidents():
            at_s, attempt = incident.detected_at_s, attempts.get(incident.attempt)
            durable = [one.step for one in checkpoints if one.attempt == incident.attempt]
            restored_step = restored.get(incident.attempt)
            if attempt is not None and attempt.start_step is not None:
                restored_step = attempt.start_step
            failure = policy.Diagnosed(
                fingerprint=str(incident.diagnosis.get("fingerprint")),
                step=incident.step,
                has_stepped=attempt is not None and attempt.first_step_at_s is not None,
                checkpoint_step=durable[-1] if durable else None,
                restored_step=restored_step,
                summary="",
                mitigation="",
                restart_helps=True,
            )
            launched_at_s = (at_s if attempt is None else attempt.started_at_s) - since_epoch_s
            state = policy.after_failure(
                limits,
                replace(state, launched_at_s=launched_at_s),
                failure,
                at_s - since_epoch_s,
                skip=skips.get(incident.attempt),
                replays=incident.attempt in replays,
            )
        in_vain = state.skipping.in_vain
        missed: policy.RollbackMissed | None = None
        # A person who starts the run has looked at earlier ones, and the effect of another rollback
        # is checked again.
        for kind, _, data in self.events("begun", "rolled_back", MISSED):
            is_missed = kind == MISSED
            missed = (
                policy.RollbackMissed(data["to_step"], data["start_step"]) if is_missed else None
            )
        return replace(
            state,
            skipping=replace(self.skipping, in_vain=in_vain),
            missed_rollback=missed,
        )
