"""Keeps one run going: launches, watches, diagnoses, restarts, until it is over.

One event loop. What happens comes from the ranks (over the channel), from the job's processes, from a ticker and
from whoever asks to stop; what to do about it is decided by `policy.decide` alone; this file carries it out and
writes it down.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.diagnose import Diagnosis, diagnose
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import ChannelServer, Peer
from holdfast.recover.launch import Job, launch
from holdfast.recover.run_lock import RunLock
from holdfast.recover.spec import MIB, RunSpec
from holdfast.recover.stop_vote import StopVote

TICK_S = 0.1
STANDSTILL_S = 2.0
"""A tick this late means that the supervisor itself stood still (suspended, starved), not the job."""
OWN_ERROR = re.compile(r"^holdfast(?:\.core\.errors\.\w+)?: ")
"""What Holdfast's own sentences begin with: they say the rest better."""
SUMMARY_CHARACTERS = 400
NO_STEP = (
    "It ended without reporting a step, so its progress could not be watched. If it trains, add "
    "`run = holdfast.attach()` and `run.step(step, loss=loss)` to it; if it should have trained, see "
    "`holdfast logs {run_id}`."
)

Observer = Callable[[str, Mapping[str, Any]], None]
"""Told what happens, as it happens: a kind (launch, step, restored, checkpoint, incident, resolved, resumed,
stopping, ended) and its data. It must return quickly."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: str
    exit_code: int
    sentence: str


class Supervisor:
    """Supervises one run from its first launch, or from where a dead supervisor left it, to its end."""

    def __init__(
        self,
        spec: RunSpec,
        paths: RunPaths,
        ledger: Ledger,
        lock: RunLock,
        *,
        observer: Observer = lambda _kind, _data: None,
        clock: Clock | None = None,
        echo: bool = False,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._ledger = ledger
        self._lock = lock
        self._observe = observer
        self._clock = clock or SystemClock()
        self._echo = echo
        self._run_id = paths.run_id
        self._state = policy.State()
        self._channel = ChannelServer(self._heard)
        self._journal = StepJournal(paths.steps)
        self._view = AttemptView.begin(0, spec.hangs)
        self._job: Job | None = None
        self._vote: StopVote | None = None
        self._incident: Incident | None = None
        """The one being worked on, until the job is training again."""
        self._summary = ""
        self._detected = (0.0, 0.0)
        """When the fault happened and when it was seen, wall time; of the incident being worked on."""
        self._awaiting_first_step = True
        self._world_size_known = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[Outcome] | None = None

    async def run(self, *, resumed: bool = False) -> Outcome:
        """Supervise until the run is over.

        Args:
            resumed: the run's supervisor died and this one goes on in its place, with what it had learnt.
        """
        self._ended = asyncio.get_running_loop().create_future()
        if resumed:
            self._state = self._remembered()
        self._view.number = max((attempt.number for attempt in self._ledger.attempts(self._run_id)), default=0)
        await self._channel.start()
        ticker = asyncio.create_task(self._tick_forever())
        try:
            self._tell(policy.Begin())
            return await self._ended
        finally:
            ticker.cancel()
            if self._job is not None:
                self._job.kill()
            await self._channel.close()
            self._journal.close()

    def ask_to_stop(self, by: str) -> None:
        """Save state and stop; asked again, stop at once."""
        self._record("stop_asked", {"by": by})
        self._observe("stopping", {"by": by})
        self._tell(policy.StopAsked(by))

    # What happens

    def _heard(self, peer: Peer, message: dict[str, Any]) -> None:
        exits = len(self._view.exits)
        try:
            self._view.heard(peer, message, self._clock.monotonic_s())
            for end in self._view.exits[exits:]:
                if end.exit_code != 0:
                    ended = {"pid": end.pid, "exit_code": end.exit_code, "signal": end.signal}
                    self._record("rank_exited", ended, end.rank)
                    self._tell(policy.RankFailed())
            match message["kind"]:
                case "hello" if not self._world_size_known:
                    self._world_size_known = True
                    self._record("started", {"world_size": peer.world_size})
                case "step":
                    self._stepped(peer, message)
                case "event":
                    self._event(peer, str(message["event"]), dict(message["data"]))
                case "vote" if self._vote is not None:
                    self._voted(self._vote, peer.rank, message)
                case "stopped" if self._vote is not None and self._vote.left(peer.rank):
                    self._tell(policy.StateSaved())
        except (KeyError, TypeError, ValueError) as error:
            # The ranks run the user's code: what they send is recorded as wrong, and ends nothing.
            self._record("malformed_message", {"message": str(message)[:500], "error": repr(error)}, peer.rank)

    def _stepped(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.rank != min(self._view.attached):
            return
        step, at_s = int(message["step"]), float(message["at_s"])
        if self._awaiting_first_step:
            self._first_step(step, at_s)
        metrics = {str(name): float(value) for name, value in message["metrics"].items()}
        loss = None if message["loss"] is None else float(message["loss"])
        record = StepRecord(
            attempt=self._view.number,
            rank=peer.rank,
            step=step,
            at_s=at_s,
            step_s=float(message["step_s"]),
            loss=loss,
            metrics=metrics,
        )
        self._journal.append(record)
        self._observe("step", {"step": step, "loss": loss, "pids": dict(self._view.rank_pids), **metrics})

    def _first_step(self, step: int, at_s: float) -> None:
        self._awaiting_first_step = False
        restored = self._view.restored
        start_step = int(restored["step"]) if restored is not None else step - 1
        self._ledger.set_attempt(self._run_id, self._view.number, start_step=start_step, first_step_at_s=at_s)
        if self._incident is not None:
            assert self._incident.incident_id is not None
            self._ledger.set_incident(self._incident.incident_id, resumed_at_s=at_s, restored_step=start_step)
            seconds = at_s - self._incident.detected_at_s
            self._observe("resumed", {"step": step, "restored_step": start_step, "seconds_to_restart": seconds})
            self._incident = None

    def _event(self, peer: Peer, kind: str, data: dict[str, Any]) -> None:
        if kind == "checkpoint":
            self._ledger.add_checkpoint(
                Checkpoint(
                    run_id=self._run_id,
                    attempt=self._view.number,
                    step=int(data["step"]),
                    path=str(data["path"]),
                    state="written",
                    size_bytes=int(data["size_bytes"]),
                    stall_s=float(data["stall_s"]),
                    committed_at_s=self._clock.now_s(),
                )
            )
        else:
            self._record(kind, data, peer.rank)
        self._observe(kind, data)

    def _voted(self, vote: StopVote, rank: int, message: dict[str, Any]) -> None:
        decision = vote.voted(rank, message)
        if decision is None:
            return
        self._channel.send_to_ranks(decision)
        if not vote.can_save:
            self._tell(policy.CannotSave())
        elif not decision["commit"]:
            self._channel.send_to_ranks(vote.propose(self._view.last_step))

    async def _tick_forever(self) -> None:
        last_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock.monotonic_s()
            if now_s - last_s > STANDSTILL_S:
                self._view.detector.resumed(now_s - last_s)
            last_s = now_s
            watching = self._state.phase in (policy.Phase.RUNNING, policy.Phase.STOPPING)
            if watching and self._view.check(now_s) is not None:
                self._tell(policy.JobFrozen())
            self._tell(policy.Tick())

    # What is done about it

    def _tell(self, event: policy.Event) -> None:
        before = self._state.phase
        now_s = self._clock.monotonic_s()
        self._state, actions = policy.decide(self._spec.restarts, self._state, event, now_s)
        if before is policy.Phase.RUNNING and self._state.phase in (
            policy.Phase.FAILING,
            policy.Phase.DIAGNOSING,
        ):
            self._begin_incident(now_s)
        for action in actions:
            self._do(action)

    def _do(self, action: policy.Action) -> None:
        match action:
            case policy.Launch():
                self._spawn(self._attempt())
            case policy.Kill():
                if self._job is not None:
                    self._job.kill()
            case policy.Diagnose():
                self._spawn(self._diagnose())
            case policy.AskRanksToSave():
                self._ask_ranks_to_save()
            case policy.Resolve():
                self._resolve(action)
            case policy.End():
                self._end(action)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _attempt(self) -> None:
        self._view = AttemptView.begin(self._view.number + 1, self._spec.hangs)
        self._awaiting_first_step, self._world_size_known = True, False
        self._vote = None
        number = self._view.number
        self._ledger.add_attempt(Attempt(run_id=self._run_id, number=number, started_at_s=self._clock.now_s()))
        self._observe("launch", {"attempt": number})
        self._job = await launch(
            self._spec,
            self._paths,
            number,
            address=self._channel.address,
            token=self._channel.token,
            lock_fd=self._lock.fd,
            echo=self._echo,
        )
        returncode = await self._job.wait()
        self._job = None
        now_s = self._clock.now_s()
        with self._paths.observer_log(number).open("a", encoding="utf-8") as log:
            log.writelines(self._view.observations(now_s))
        if self._view.dropped_log_bytes:
            self._record("log_dropped", {"bytes": self._view.dropped_log_bytes})
        stopping = self._state.stop_by is not None
        outcome = "stopped" if stopping else "completed" if returncode == 0 else "failed"
        self._ledger.set_attempt(
            self._run_id, number, ended_at_s=now_s, outcome=outcome, last_step=self._view.last_step
        )
        self._tell(policy.JobExited(returncode))

    def _begin_incident(self, monotonic_s: float) -> None:
        now_s = self._clock.now_s()
        view = self._view
        fault_at_s = now_s
        if view.frozen is not None:
            fault_at_s = now_s - view.frozen.waited_s
        elif view.first_failure is not None:
            fault_at_s = now_s - monotonic_s + view.first_failure.at_monotonic_s
        self._detected = (fault_at_s, now_s)
        self._observe("incident", {"kind": "hang" if view.frozen else "exit", "rank": view.blamed_rank})

    async def _diagnose(self) -> None:
        view = self._view
        diagnosis: Diagnosis = await asyncio.to_thread(
            diagnose, [self._paths.attempt_logs(view.number)], view.context()
        )
        fault_at_s, detected_at_s = self._detected
        incident = Incident(
            run_id=self._run_id,
            attempt=view.number,
            kind="hang" if view.frozen is not None else "exit",
            rank=view.blamed_rank,
            step=view.last_step,
            fault_at_s=fault_at_s,
            detected_at_s=detected_at_s,
            diagnosis=diagnosis.to_json(),
        )
        self._incident = Incident(**{**vars(incident), "incident_id": self._ledger.add_incident(incident)})
        self._summary = _summary(diagnosis)
        self._tell(
            policy.Diagnosed(
                fingerprint=diagnosis.fingerprint,
                step=view.last_step,
                summary=self._summary,
                mitigation=diagnosis.mitigation,
                restart_helps=diagnosis.restart_helps,
                waits_for_outside=diagnosis.action == "wait_and_retry",
            )
        )

    def _resolve(self, resolve: policy.Resolve) -> None:
        assert self._incident is not None
        assert self._incident.incident_id is not None
        self._ledger.set_incident(self._incident.incident_id, action=resolve.action, explanation=resolve.explanation)
        self._observe(
            "resolved",
            {
                "incident_id": self._incident.incident_id,
                "action": resolve.action,
                "summary": self._summary,
                "explanation": resolve.explanation,
            },
        )

    def _ask_ranks_to_save(self) -> None:
        living = self._view.attached - {end.rank for end in self._view.exits}
        if not living or len(living) < (self._view.world_size or 1):
            self._tell(policy.CannotSave())
            return
        self._vote = StopVote(frozenset(living), self._view.detector.median_step_s)
        self._channel.send_to_ranks(self._vote.propose(self._view.last_step))

    def _end(self, end: policy.End) -> None:
        sentence = " ".join([end.outcome, *self._remarks(end)])
        self._ledger.set_run(
            self._run_id,
            state=end.state,
            ended_at_s=self._clock.now_s(),
            exit_code=end.exit_code,
            outcome=sentence,
        )
        self._observe("ended", {"state": end.state, "outcome": sentence})
        assert self._ended is not None
        self._ended.set_result(Outcome(state=end.state, exit_code=end.exit_code, sentence=sentence))

    def _remarks(self, end: policy.End) -> list[str]:
        remarks = []
        if end.state == "completed" and not any(
            attempt.first_step_at_s for attempt in self._ledger.attempts(self._run_id)
        ):
            remarks.append(NO_STEP.format(run_id=self._run_id))
        if end.state == "stopped":
            remarks.append(self._where_to_go_on())
        if self._view.dropped_log_bytes:
            remarks.append(
                f"Its output was cut: the last {self._spec.log_max_mib} MiB of each rank were kept and "
                f"{self._view.dropped_log_bytes / MIB:.0f} MiB before them dropped; print less, or raise --log-max-mib."
            )
        return remarks

    def _where_to_go_on(self) -> str:
        checkpoints = self._ledger.checkpoints(self._run_id)
        if not checkpoints:
            return "No checkpoint was saved."
        newest = checkpoints[-1]
        return (
            f"State is safe at step {newest.step} in {newest.path}; "
            f"`holdfast run --resume {self._run_id}` goes on from there."
        )

    def _remembered(self) -> policy.State:
        """What a dead supervisor of this run had learnt: the roots it saw and the restarts it spent."""
        incidents = self._ledger.incidents(self._run_id)
        ago_s = self._clock.now_s() - self._clock.monotonic_s()
        steps = [incident.step or 0 for incident in incidents]
        return policy.State(
            failed_at=frozenset((str(incident.diagnosis.get("fingerprint")), incident.step) for incident in incidents),
            restarts_at_s=tuple(
                incident.detected_at_s - ago_s for incident in incidents if incident.action == "restart"
            ),
            last_failed_step=max(steps, default=None),
        )

    def _record(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        self._ledger.add_event(
            Event(
                run_id=self._run_id,
                attempt=self._view.number,
                at_s=self._clock.now_s(),
                kind=kind,
                rank=rank,
                data=data,
            )
        )


def _summary(diagnosis: Diagnosis) -> str:
    """The cause in a sentence: the reason, and what the root line says after its class or its time stamp."""
    said = OWN_ERROR.sub("", diagnosis.root_text.strip())[:SUMMARY_CHARACTERS]
    if diagnosis.reason == "Others" and said:  # a name for what has none says nothing
        return f"{said.rstrip('.')}."
    return f"{diagnosis.reason}: {said.rstrip('.')}." if said else f"{diagnosis.reason}."
