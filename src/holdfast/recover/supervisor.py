"""Keeps one run going: launches, watches, diagnoses, restarts, until it is over.

One event loop. What happens comes from the ranks (over the channel), from the job's processes, from a ticker and
from whoever asks to stop; what to do about it is decided by `policy.decide` alone; this file carries it out.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.core.failure_history import FailureHistory
from holdfast.core.ledger import Incident, Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.processes import activity
from holdfast.core.telemetry import StepRecord
from holdfast.diagnose import Diagnosis, diagnose
from holdfast.diagnose.memory import Known
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import ChannelServer, Peer
from holdfast.recover.detectors.anomaly import Anomaly, AnomalyDetector
from holdfast.recover.follower import LogFollower
from holdfast.recover.gate import NOT_HEALTHY, CheckpointGate, hold, let_go, mark_healthy
from holdfast.recover.kept_memory import end_kept_memory
from holdfast.recover.launch import Job, attempt_environment, launch, make_log_folder
from holdfast.recover.outcome import Outcome, outcome_of
from holdfast.recover.recorder import Recorder
from holdfast.recover.run_lock import RunLock
from holdfast.recover.spec import RunSpec
from holdfast.recover.stop_vote import StopVote

TICK_S = 0.1
ACCEPTED = "The loss jumped, and a restart would not mend that: the training goes on from there"
STANDSTILL_S = 2.0
"""A tick this late means that the supervisor itself stood still (suspended, starved), not the job."""
WARM_AFTER_S = 5.0
"""How long after a rank's first step a warm process imports the rank's modules, so as not to slow the start."""
KILL_TIMEOUT_S = 5.0
"""How long the shims may take to end their trainers by SIGKILL, before every process of the job is ended."""
SWEEP_TIMEOUT_S = 30.0
"""How long, likewise, they may take to end all that the trainers have started."""
SIGTERM_HOLD_S = 5.0
"""How long after a rank's SIGTERM the supervisor's own may come."""
RANK_EVENTS = ("restored", "checkpoint", "save_failed", "disk_full")
"""What ranks tell that the observer hears too; a script's own events are for the record."""

Observer = Callable[[str, Mapping[str, Any]], None]
"""Told what happens, as it happens: a kind (launch, step, restored, checkpoint, save_failed, disk_full, incident,
resolved, resumed, stopping, trouble, ended) and its data. It must return quickly."""


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
        self._observer: Observer | None = observer
        self._clock = clock or SystemClock()
        self._echo = echo
        self._recorder = Recorder(
            paths,
            ledger,
            self._clock,
            complain=lambda text: self._observe("trouble", {"text": text}),
        )
        self._channel = ChannelServer(self._heard)
        self._state = policy.State()
        self._view = AttemptView.begin(self._recorder.attempt, spec.hangs)
        self._anomalies = AnomalyDetector()
        self._gate = CheckpointGate(
            healthy_after=spec.healthy_after,
            folders=self._recorder.checkpoint_folders() or set(),
        )
        self._logs = self._follower()
        self._job: Job | None = None
        self._launched_attempt = 0
        """The attempt for which the launcher was started."""
        self._all_ended = asyncio.Event()
        self._kill_asked = False
        self._vote: StopVote | None = None
        self._detected = (0.0, 0.0)
        """When the fault happened and when it was seen, wall time; of the incident being worked on."""
        self._failed_after: int | None = None
        """Steps completed by then: ranks that do not wait for each other may report more before they are ended."""
        self._incident: Incident | None = None
        """The one being worked on, until the job is training again."""
        self._summary = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._marking: set[asyncio.Task[None]] = set()
        """Tasks that change the marks of a checkpoint."""
        self._marks_lock = asyncio.Lock()
        self._ended: asyncio.Future[Outcome] | None = None

    async def run(self, *, resumed: bool = False) -> Outcome:
        """Supervise until the run is over.

        Args:
            resumed: the run's supervisor died and this one goes on in its place, with what it had learnt.
        """
        self._ended = asyncio.get_running_loop().create_future()
        if resumed:
            self._state = self._recorder.remembered(self._spec.restarts)
        try:
            await self._channel.start()
            self._spawn(self._tick_forever())
            self._tell(policy.Begin())
            return await self._ended
        except Exception as error:
            said = f"Holdfast itself failed: {type(error).__name__}: {error}."
            self._recorder.run_ended(state="failed", exit_code=1, outcome=said)
            if isinstance(error, OSError):  # the machine's refusal, not a bug: no traceback
                raise HoldfastError(
                    f"{said} Mend that, then `holdfast run --resume {self._paths.run_id}`."
                ) from error
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await self._end_job()
            await asyncio.to_thread(end_kept_memory)
            self._logs.close()
            await self._channel.close()
            self._recorder.close()

    def ask_to_stop(self, by: str) -> None:
        """Save state and stop; asked again, stop at once."""
        self._tell(policy.StopAsked(by))
        self._recorder.event("stop_asked", {"by": by})
        self._observe("stopping", {"by": by})

    # What happens

    def _heard(self, peer: Peer, message: dict[str, Any]) -> None:
        if not self._is_present(peer, message):
            return  # the last words of an attempt that is over
        began, ended = self._view.world_size is None, len(self._view.exits)
        try:
            self._view.heard(peer, message, self._clock.monotonic_s())
            match message["kind"]:
                case "hello" | "started" if began:
                    self._recorder.event("started", {"world_size": peer.world_size})
                case "imported":
                    self._warm_later(peer)
                case "step":
                    if peer.rank == min(self._view.watched, default=None):
                        self._stepped(peer, message)
                    self._look_at_loss(peer, message)
                case "event":
                    self._event(peer, str(message["event"]), dict(message["data"]))
                case "vote" | "sigterm" | "stopped":
                    self._stopping(peer, message)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            # The ranks run the user's code: what they send is recorded as wrong, and ends nothing.
            wrong = {"message": str(message)[:500], "error": repr(error)}
            self._recorder.event("malformed_message", wrong, peer.rank)
        if self._view.all_ended:
            self._all_ended.set()
        for end in self._view.exits[ended:]:
            if end.exit_code != 0:
                how = {"pid": end.pid, "exit_code": end.exit_code, "signal": end.signal}
                self._recorder.event("rank_exited", how, end.rank)
                self._tell(policy.RankFailed())

    def _is_present(self, peer: Peer, message: Mapping[str, Any]) -> bool:
        """Return whether a message is of the present attempt; a shim takes part in several."""
        if peer.role == "shim" and peer.attempt >= self._launched_attempt:
            return bool(message.get("attempt", self._view.number) == self._view.number)
        return peer.attempt == self._view.number

    def _warm_later(self, peer: Peer) -> None:
        def warm() -> None:
            if peer.attempt == self._view.number:
                self._channel.send({"kind": "warm"}, to="shim", rank=peer.rank)

        asyncio.get_running_loop().call_later(WARM_AFTER_S, warm)

    def _stepped(self, peer: Peer, message: dict[str, Any]) -> None:
        record = StepRecord(
            attempt=self._view.number,
            rank=peer.rank,
            step=int(message["step"]),
            at_s=float(message["at_s"]),
            step_s=float(message["step_s"]),
            loss=None if message["loss"] is None else float(message["loss"]),
            metrics={str(name): float(value) for name, value in message["metrics"].items()},
        )
        if self._view.start_step is None:
            self._first_step(record)
        self._recorder.step(record)
        told = {"step": record.step, "loss": record.loss, "pids": dict(self._view.rank_pids)}
        self._observe("step", {**told, **record.metrics})

    def _look_at_loss(self, peer: Peer, message: Mapping[str, Any]) -> None:
        is_watched = self._spec.healthy_after > 0 and message["loss"] is not None
        if self._state.phase is not policy.Phase.RUNNING or not is_watched:
            return
        step, loss = int(message["step"]), float(message["loss"])
        leads = self._view.leads_losses(peer.rank)
        found = self._anomalies.look(peer.rank, step, loss, leads=leads)
        if found is None:
            for path in self._gate.passed(step) if leads and self._anomalies.is_calm else ():
                self._mark(path, functools.partial(mark_healthy, path, step))
            return
        self._view.anomaly = found
        can_go_back, is_spike = self._gate.can_go_back(found.first_step), found.kind == "spike"
        self._tell(policy.LossBroken(step=found.step, is_spike=is_spike, can_go_back=can_go_back))
        if self._state.phase is policy.Phase.RUNNING:
            self._view.anomaly = None
            self._anomalies.accept()
            self._recorder.event("loss_accepted", found.to_json(), peer.rank)
            self._observe("trouble", {"text": f"{ACCEPTED} (step {found.step})."})

    def _mark(self, path: Path, change: Callable[[float], str | None]) -> None:
        async def mark() -> None:
            async with self._marks_lock:  # a hold must not come after the release
                error = await asyncio.to_thread(change, self._clock.now_s())
            if error is not None:
                self._gate.lost(path)
                self._recorder.event("not_marked", {"path": str(path), "error": error})

        self._marking.add(marking := self._spawn(mark()))
        marking.add_done_callback(self._marking.discard)

    def _take_in_checkpoint(self, kind: str, path: Path, step: int) -> None:
        if kind == "checkpoint" and self._view.loss_leader is None:
            self._gate.folders.add(path.parent)  # without losses nothing becomes healthy
        elif kind == "checkpoint" and self._gate.saved(path, step):
            self._mark(path, functools.partial(hold, path))
        elif kind == "restored" and self._view.start_step is None:
            for left in self._gate.restored(step):
                self._mark(left, functools.partial(let_go, left))

    def _first_step(self, record: StepRecord) -> None:
        restored = self._view.restored
        start_step = record.step - 1
        if restored is not None:  # a step beyond is of another training
            start_step = min(start_step, int(restored["step"]))
        self._view.start_step = start_step
        self._anomalies.restarted(start_step)
        self._recorder.first_step(start_step, record.at_s)
        incident, self._incident = self._incident, None
        if incident is None:
            return
        if incident.incident_id is not None:
            self._recorder.resumed(incident.incident_id, record.at_s, start_step)
        seconds = record.at_s - incident.detected_at_s
        told = {"step": record.step, "restored_step": start_step, "seconds_to_restart": seconds}
        self._observe("resumed", told)

    def _event(self, peer: Peer, kind: str, data: dict[str, Any]) -> None:
        if kind in ("checkpoint", "restored"):
            self._take_in_checkpoint(kind, Path(str(data["path"])), int(data["step"]))
        if kind == "checkpoint":
            self._recorder.checkpoint(data)
        else:
            self._recorder.event(kind, data, peer.rank)
        if kind in RANK_EVENTS:
            self._observe(kind, data)

    def _stopping(self, peer: Peer, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "sigterm":
                self._hold_sigterm(peer)
            case "vote" if self._vote is not None:
                self._voted(self._vote, peer.rank, message)
            case "stopped" if self._vote is not None and self._vote.left(peer.rank):
                self._tell(policy.StateSaved())

    def _voted(self, vote: StopVote, rank: int, message: dict[str, Any]) -> None:
        decision = vote.voted(rank, message)
        if decision is None:
            return
        self._channel.send(decision, to="rank")
        if not vote.can_save:
            self._tell(policy.CannotSave())
        elif not decision["commit"]:
            self._channel.send(vote.propose(self._view.last_step), to="rank")

    def _hold_sigterm(self, peer: Peer) -> None:
        """Give a rank that got SIGTERM back to its signal, where the run is not asked to stop within a while.

        A scheduler sends SIGTERM to every process of a job, this one among them, and the ranks first save their state.
        """

        def release() -> None:
            if peer.attempt == self._view.number and self._state.stop_by is None:
                self._channel.send({"kind": "terminate"}, only=peer)

        asyncio.get_running_loop().call_later(SIGTERM_HOLD_S, release)

    async def _tick_forever(self) -> None:
        last_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock.monotonic_s()
            if now_s - last_s > STANDSTILL_S:
                self._view.detector.resumed(now_s - last_s)
            if self._watching and self._view.detector.look_due(now_s):
                await self._look()
                now_s = self._clock.monotonic_s()
            last_s = now_s  # after the look: the time that a look takes is no standstill
            if self._watching:
                if self._view.check(now_s) is not None:
                    self._tell(policy.JobFrozen())
                elif self._view.left is not None:
                    self._tell(policy.RankFailed())
            self._tell(policy.Tick())

    @property
    def _watching(self) -> bool:
        return self._state.phase in (policy.Phase.RUNNING, policy.Phase.STOPPING)

    async def _look(self) -> None:
        view = self._view
        pids = {rank: view.rank_pids[rank] for rank in view.detector.living}
        used = await asyncio.to_thread(activity, pids)
        view.looked(used, self._clock.monotonic_s())
        self._channel.send({"kind": "look"}, to="rank")

    # What is done about it

    def _tell(self, event: policy.Event) -> None:
        before = self._state.phase
        now_s = self._clock.monotonic_s()
        self._state, actions = policy.decide(self._spec.restarts, self._state, event, now_s)
        failing = (policy.Phase.FAILING, policy.Phase.DIAGNOSING)
        if before is policy.Phase.RUNNING and self._state.phase in failing:
            self._begin_incident(now_s)
        for action in actions:
            self._do(action)

    def _do(self, action: policy.Action) -> None:
        match action:
            case policy.Launch():
                self._kill_asked = False
                in_place = action.in_place and self._job is not None and self._view.can_start_again
                self._view = AttemptView.begin(self._view.number + 1, self._spec.hangs)
                if not in_place:  # what the shims of the former launcher say is past
                    self._launched_attempt = self._view.number
                self._spawn(self._attempt(in_place=in_place))
            case policy.Terminate():
                if self._job is None or not self._view.rank_pids:  # there is no rank to ask yet
                    self._kill()
                elif not self._channel.send({"kind": "terminate"}):
                    self._job.kill()
            case policy.Kill():
                self._kill()
            case policy.Diagnose():
                self._spawn(self._diagnose())
            case policy.AskRanksToSave():
                self._ask_ranks_to_save()
            case policy.Resolve():
                self._resolve(action)
            case policy.End():
                self._end(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _kill(self) -> None:
        self._kill_asked = self._view.killed = True
        job, number = self._job, self._view.number
        if job is None:
            return
        if self._state.stop_by is not None or not self._view.can_start_again:
            job.kill()
            return

        def kill_all(*, swept: bool) -> None:
            ended = self._view.all_ended if swept else self._view.all_exited
            if self._view.number == number and not ended:
                job.kill()

        self._channel.send({"kind": "kill"}, to="shim")
        loop = asyncio.get_running_loop()
        loop.call_later(KILL_TIMEOUT_S, functools.partial(kill_all, swept=False))
        loop.call_later(SWEEP_TIMEOUT_S, functools.partial(kill_all, swept=True))

    async def _end_job(self) -> None:
        """End every process of the job, and wait until they are gone."""
        job, self._job = self._job, None
        if job is not None:
            job.kill()
            await job.wait()

    async def _attempt(self, *, in_place: bool) -> None:
        self._all_ended.clear()
        self._vote = None
        number = self._view.number
        self._logs.close()
        self._logs = self._follower()
        self._spawn(self._logs.follow())
        self._recorder.attempt_began(number)
        self._observe("launch", {"attempt": number, "in_place": in_place})
        history = self._recorder.failures() or FailureHistory()
        if in_place:
            self._start_again(number, history)
        else:
            await self._end_job()
            self._job = await launch(
                self._spec,
                self._paths,
                number,
                address=self._channel.address,
                token=self._channel.token,
                lock_fd=self._lock.fd,
                echo=self._echo,
                history=history,
            )
        if self._kill_asked:  # while it was being started
            self._kill()
        returncode = await self._end_of_attempt()
        self._recorder.observed(self._view.observations(self._clock.now_s()))
        if self._view.dropped_log_bytes:
            self._recorder.event("log_dropped", {"bytes": self._view.dropped_log_bytes})
        stopping = self._state.stop_by is not None
        outcome = "stopped" if stopping else "completed" if returncode == 0 else "failed"
        self._recorder.attempt_ended(outcome=outcome, last_step=self._view.last_step)
        self._tell(policy.JobExited(returncode))

    def _start_again(self, number: int, history: FailureHistory) -> None:
        environment = attempt_environment(number, history)
        environment["TORCHELASTIC_RESTART_COUNT"] = str(number - self._launched_attempt)
        logs = str(make_log_folder(self._paths, number, launched=self._launched_attempt))
        order = {"kind": "start", "attempt": number, "logs": logs, "environment": environment}
        self._channel.send(order, to="shim")

    async def _end_of_attempt(self) -> int:
        """Wait until no trainer is left; return 0 where all of them ended well.

        The launcher and the shims stay where the next attempt can start below them.
        """
        job = self._job
        assert job is not None
        ended = asyncio.create_task(self._all_ended.wait())
        over = asyncio.create_task(job.wait())
        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        failure = self._view.first_failure
        if (
            not over.done()
            and failure is not None
            and self._state.stop_by is None
            and self._view.can_start_again
        ):
            over.cancel()
            return failure.exit_code or -(failure.signal or 0)
        if not over.done():
            self._channel.send({"kind": "leave"}, to="shim")
        returncode = await over
        self._job = None
        self._view.launcher_ended(returncode)
        return returncode

    def _begin_incident(self, monotonic_s: float) -> None:
        now_s = self._clock.now_s()
        view = self._view
        fault_at_s = now_s
        if view.frozen is not None:
            fault_at_s = now_s - view.frozen.waited_s
        elif view.culprit is not None:
            fault_at_s = now_s - monotonic_s + view.culprit.at_monotonic_s
        self._detected = (fault_at_s, now_s)
        # The ranks go on until they are killed, so that only the step of the anomaly is the same each time.
        self._failed_after = view.steps_completed if view.anomaly is None else view.anomaly.step
        told = {
            "kind": view.kind_of_failure,
            "rank": None if view.in_doubt else view.blamed_rank,
        }
        self._observe("incident", told)

    def _follower(self) -> LogFollower:
        logs = self._paths.attempt_logs(self._view.number)
        return LogFollower(logs, lambda: Known.of_ledger(self._ledger, self._paths.home))

    async def _diagnose(self) -> None:
        view, context = self._view, self._view.context()
        try:
            diagnosis = await asyncio.to_thread(self._logs.diagnosis, context)
        except Exception as error:
            # Logs are untrusted: a run does not end because they could not be read.
            self._observe(
                "trouble", {"text": f"The diagnosis failed: {type(error).__name__}: {error}."}
            )
            diagnosis = diagnose([], context)
        checkpoint_step, mitigation = self._recorder.checkpoint_step, diagnosis.mitigation
        if view.anomaly is not None:
            checkpoint_step = await self._roll_back(view.anomaly)
            if checkpoint_step is None:
                mitigation = f"{NOT_HEALTHY} {mitigation}"
        fault_at_s, detected_at_s = self._detected
        incident = Incident(
            run_id=self._paths.run_id,
            attempt=view.number,
            kind=view.kind_of_failure,
            rank=self._rank_at_fault(diagnosis),
            step=self._failed_after,
            fault_at_s=fault_at_s,
            detected_at_s=detected_at_s,
            diagnosis=diagnosis.to_json(),
        )
        self._incident = replace(incident, incident_id=self._recorder.incident(incident))
        self._summary = diagnosis.summary
        if view.frozen is not None and view.frozen.only_silence:  # it may have been at work
            self._summary += f" {diagnosis.mitigation}"
        self._tell(
            view.failure(
                diagnosis,
                step=self._failed_after,
                checkpoint_step=checkpoint_step,
                mitigation=mitigation,
            )
        )

    async def _roll_back(self, anomaly: Anomaly) -> int | None:
        """Abandon what may be broken; return the step of the healthy checkpoint to go on from, None without one."""
        if self._marking:
            await asyncio.wait(self._marking)
        try:
            step = await asyncio.to_thread(self._gate.go_back, anomaly.first_step)
        except (HoldfastError, OSError) as error:
            self._observe("trouble", {"text": f"The job cannot go back to a checkpoint: {error}."})
            return None
        self._recorder.event("rolled_back", {**anomaly.to_json(), "to_step": step})
        return step

    def _rank_at_fault(self, diagnosis: Diagnosis) -> int | None:
        """Return the rank at fault. Logs alone show whether a rank that ended with code 0 ended the others."""
        rank = diagnosis.scope.get("rank")
        left = diagnosis.decided_by[:1] == ("observer-left",) and isinstance(rank, int)
        return rank if left else self._view.blamed_rank

    def _resolve(self, resolve: policy.Resolve) -> None:
        assert self._incident is not None
        incident_id = self._incident.incident_id
        if incident_id is not None:
            self._recorder.resolved(incident_id, resolve)
        told = {"incident_id": incident_id, "summary": self._summary}
        self._observe(
            "resolved", {**told, "action": resolve.action, "explanation": resolve.explanation}
        )

    def _ask_ranks_to_save(self) -> None:
        living = self._view.attached - {end.rank for end in self._view.exits}
        if not living or len(living) < (self._view.world_size or 1):
            self._tell(policy.CannotSave())
            return
        self._vote = StopVote(frozenset(living), self._view.detector.median_step_s)
        self._channel.send(self._vote.propose(self._view.last_step), to="rank")

    def _end(self, end: policy.End) -> None:
        outcome = outcome_of(
            end,
            run_id=self._paths.run_id,
            spec=self._spec,
            view=self._view,
            recorder=self._recorder,
        )
        self._recorder.run_ended(
            state=outcome.state, exit_code=outcome.exit_code, outcome=outcome.sentence
        )
        self._observe("ended", {"state": outcome.state, "outcome": outcome.sentence})
        assert self._ended is not None
        self._ended.set_result(outcome)

    def _observe(self, kind: str, data: Mapping[str, Any]) -> None:
        """Tell the observer, for as long as it can be told: a terminal that was closed ends no run."""
        if self._observer is None:
            return
        try:
            self._observer(kind, data)
        except OSError:
            self._observer = None
