"""Carry out the policy's decisions for one run.

`Conduct.decide_on` passes an event to `people.decisions`, which calls `policy.decide`, and carries out
the returned actions.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdfast.cluster import is_in_pod
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.tasks import Tasks
from holdfast.diagnose.memory import Known
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.casework import Casework
from holdfast.recover.follower import LogFollower
from holdfast.recover.gate import NOT_HEALTHY
from holdfast.recover.launching.launches import Launches
from holdfast.recover.leadership import HandedOver
from holdfast.recover.localise.in_run import NodeTests
from holdfast.recover.losses import Losses
from holdfast.recover.nodes import Nodes
from holdfast.recover.outage import Outage, named_in
from holdfast.recover.outcome import Outcome, outcome_of
from holdfast.recover.people import modes
from holdfast.recover.people.decisions import Decisions
from holdfast.recover.people.rollback import ASKED, DONE, NOT_DONE, Rollback, requested
from holdfast.recover.recorder import MISSED, RecordedLaunch, Recorder
from holdfast.recover.signals.in_run import NodeHealth
from holdfast.recover.signals.slurm import states_here
from holdfast.recover.skipping.plan import Skip
from holdfast.recover.spec import RunSpec
from holdfast.recover.speed import Speed
from holdfast.recover.stopping import Stopping

KILL_TIMEOUT_S = 5.0
"""The seconds that shims have to kill their trainers, before all processes of the job are ended."""
SWEEP_TIMEOUT_S = 30.0
"""The seconds that shims have to kill all processes that the trainers started, before all processes
of the job are ended."""
END_TIMEOUT_S = 60.0
"""The seconds that nodes have to end the remaining processes of the job."""
HERE = "the first node"
"""The name of the place of a stop request that came from this supervisor's own node."""
MOVING = "moving"
"""The kind of the event that records the start or the end of a move to other nodes."""


class Conduct:
    """Carry out the decisions for one run.

    This object keeps the state of the policy and the present attempt. Call all methods from one
    event loop.
    """

    def __init__(
        self,
        spec: RunSpec,
        paths: RunPaths,
        ledger: Ledger,
        *,
        nodes: Nodes,
        recorder: Recorder,
        losses: Losses,
        clock: Clock,
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._ledger = ledger
        self._nodes = nodes
        self._recorder = recorder
        self._clock = clock
        self._observe = observe
        self.state = policy.State(skipping=recorder.skipping)
        self.view = AttemptView.begin(recorder.attempt, spec.hangs)
        self._logs = self._follower()
        self._tests = NodeTests(paths.run_id, spec, nodes, ledger, recorder, clock, observe)
        self.launches = Launches(paths, nodes, recorder, observe, self._tests, spec, clock)
        self.stopping = Stopping(paths.stop_request, nodes, recorder, self.decide_on, observe)
        self.speed = Speed(nodes, recorder, observe)
        self.casework = Casework(paths.run_id, recorder, losses, clock, observe)
        self.health = NodeHealth(
            paths.run_id,
            spec,
            nodes,
            self._tests,
            recorder,
            clock,
            observe,
            self.decide_on,
            states_here(),
        )
        self.decisions = Decisions(spec, recorder, paths.approved, observe, self.health.coverage)
        self._losses = losses
        self._rollback: Rollback | None = None
        """The request that is being carried out."""
        self._settled: int | None = None
        """The number of the last request that was carried out or could not be."""
        self.tasks = Tasks(self._failed)
        self._all_ended = asyncio.Event()
        self._kill_requested = asyncio.Event()
        self._ended: asyncio.Future[Outcome] | None = None

    def begin(self) -> asyncio.Future[Outcome]:
        """Begin, and return a future that will have the outcome of the run."""
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def over(self, outcome: Outcome) -> None:
        """Set the outcome of the run."""
        assert self._ended is not None
        self._ended.set_result(outcome)

    async def end_launchers(self) -> None:
        """End the remaining processes of the job."""
        with contextlib.suppress(TimeoutError):  # the nodes end the rest by themselves
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._nodes.end_launchers()

    def close(self) -> None:
        """Stop all background work."""
        self.tasks.cancel()
        self._logs.close()

    def remember(self) -> None:
        """Continue from the state that an earlier supervisor had recorded."""
        self.state = self._recorder.remembered(self._spec.restarts)
        self.launches.remember()
        self.health.remember()

    def take_up(self, launch: RecordedLaunch | None) -> None:
        """Continue with the attempt of an earlier supervisor.

        Args:
            launch: the launchers below which the attempt may still run.
        """
        self.view.frozen, self.view.anomaly = self._recorder.ending()
        if launch is None:
            return
        self.decisions.take_up()
        self.launches.take_over(launch.attempt, self.view.number)
        self.view.start_step = self._recorder.start_step
        if self.view.start_step is None:
            self.casework.take_up()

    def adopted(self, *, in_place: bool) -> None:
        """Update the policy's state for an attempt taken over from an earlier supervisor."""
        known = [data for _, at, data in self._recorder.events(MOVING) if at == self.view.number]
        moves = bool(known) and known[-1]["is_over"] is False
        save_s = known[-1].get("save_s") if moves else None
        event = policy.Adopted(in_place, moves=moves, save_s=save_s)
        now_s = self._clock.monotonic_s()
        self.state, _ = policy.decide(self._spec.restarts, self.state, event, now_s)

    def go_on_watching(self) -> None:
        """Follow the logs of an attempt that was taken over, and wait for the end of the attempt."""
        self._follow_logs()
        self.tasks.spawn(self._see_through())

    def request_stop(self, by: str, where: str, count: int) -> None:
        """Handle a request to stop the run (see `Stopping.ask`).

        If Kubernetes ends one pod and the job can continue without it, the run does not stop, but
        only leaves the node of that pod.
        """
        if by != "SIGTERM" or not is_in_pod() or not self._leaves(where):
            self.stopping.ask(by, where, count)

    def _leaves(self, where: str) -> bool:
        """Return True if the job can continue without the node of a pod that ends."""
        own = self._nodes.own
        node_id = where if where != HERE else "" if own is None else own.node_id
        one = next((one for one in self._nodes.connected if one.node_id == node_id), None)
        if one is None or one.is_leaving:
            return one is not None
        if self.state.phase is not policy.Phase.RUNNING or self._spec.mode != "act":
            return False
        if one is own and self._nodes.launched and one not in self._nodes.launched:
            one.is_leaving = True  # the pod leads the run but does not train
            return True
        return self.health.leave(node_id)

    def hand_over_if_due(self) -> None:
        """Hand the lead over if this supervisor's pod is ending and the job runs on other nodes.

        Raises:
            HandedOver: another node was ordered to start the next supervisor.
        """
        own = self._nodes.own
        if own is None or not own.is_leaving or self.state.phase is not policy.Phase.RUNNING:
            return
        # A node of the job continues to train even if its agent has no connection for a moment.
        if all(one.is_leaving for one in (*self._nodes.connected, *self._nodes.launched)):
            self.stopping.ask("SIGTERM", HERE, 1)  # all pods end, and so does the run
        elif own not in self._nodes.launched and self._nodes.launched:
            name = self._nodes.hand_over()
            if name is not None:
                self._recorder.event("handed_over", {"node": name})
                self._observe("nodes", {"text": f"node {name} leads from now on"})
                raise HandedOver

    def roll_back_if_requested(self) -> None:
        """End the ranks if a person has requested a rollback to an earlier checkpoint."""
        # Until the first step, the ranks may still restore.
        if self.state.phase is not policy.Phase.RUNNING or self.view.start_step is None:
            return
        asked = requested(self._paths.rollback_request)
        if asked is None or asked.number == self._settled:
            return
        known = [data.get("number") for _, _, data in self._recorder.events(DONE, NOT_DONE)]
        if asked.number in known:  # an earlier supervisor could not delete the file
            self._settled = asked.number
            return
        text = f"{asked.by} asked to go back to the checkpoint of step {asked.to_step}."
        self._rollback = asked
        self._recorder.event(ASKED, {**asked.to_json(), "text": text})
        self._observe("trouble", {"text": text})
        self.decide_on(policy.RollbackRequested(asked.to_step))

    async def _go_back(self, asked: Rollback) -> None:
        """Abandon the checkpoints after the step of a request, and record the result."""
        step: int | None = None
        why = NOT_HEALTHY
        try:
            step = await self._losses.go_back_to(asked.to_step)
        except (HoldfastError, OSError) as error:
            why = f"The job cannot go back to a checkpoint: {error}."
        if step is not None:
            self._recorder.rolled_back({"number": asked.number, "by": asked.by}, step)
        else:
            self._recorder.event(NOT_DONE, {"number": asked.number, "by": asked.by, "why": why})
            self._observe("trouble", {"text": f"{why} The training goes on from the newest."})
        self._settled, self._rollback = asked.number, None
        with contextlib.suppress(OSError):
            self._paths.rollback_request.unlink(missing_ok=True)

    def check_rollback(self, first_step: int) -> None:
        """Record a rollback before the present attempt that had no effect.

        A rollback had no effect if the attempt restored a newer checkpoint of the run than the
        rollback left. If the attempt restored no checkpoint of the run, its first reported step is
        above all steps of the attempt before.

        Args:
            first_step: the first step that the attempt reported.
        """
        rolled_back = self._recorder.rolled_back_before()
        if rolled_back is None:
            return
        to_step, reached = rolled_back
        restored = self.view.restored
        folders = self._recorder.checkpoint_folders() or set()
        if restored is not None and Path(str(restored.get("path"))).parent in folders:
            start_step = int(restored["step"])
            is_missed = start_step > to_step
        else:
            start_step, is_missed = first_step - 1, first_step > reached
        if not is_missed:
            return
        missed = policy.RollbackMissed(to_step, start_step)
        self._recorder.event(MISSED, {**asdict(missed), "text": missed.sentence})
        self._observe("trouble", {"text": f"{missed.sentence} {policy.RESTORE}"})
        self.decide_on(missed)

    def grow_if_possible(self) -> None:
        """Have the ranks save and end, if the job can be launched on more nodes now."""
        is_free = self.state.phase is policy.Phase.RUNNING and not self.state.keeps_size
        if self._spec.mode == "act" and is_free and self.launches.can_grow and self.view.steps:
            self._observe("nodes", {"text": "nodes are back: saving, then going on with more"})
            self.decide_on(policy.NodesBack())

    def all_ended(self) -> None:
        """Record that no trainer of the present attempt is left."""
        self._all_ended.set()

    def decide_on(self, event: modes.Event) -> None:
        """Have the policy decide on an event, and carry out the decision."""
        before, view, now_s = self.state, self.view, self._clock.monotonic_s()
        verdict = self.decisions.decide(view, before, event, now_s)
        self.state = verdict.state
        if self.state.is_moving != before.is_moving:
            # Otherwise, the next supervisor could take the ends of the ranks for the end of the
            # training.
            is_over = not self.state.is_moving
            data = {"is_over": is_over, "node": self.state.leaving, "save_s": self.state.save_s}
            self._recorder.event(MOVING, data)
        failing = (policy.Phase.FAILING, policy.Phase.DIAGNOSING)
        if before.phase not in failing and self.state.phase in failing:
            self.casework.begin(view)
        for action in verdict.actions:
            self._do(action)
        self.decisions.record(view, before, event, verdict, now_s)

    def _do(self, action: modes.Action) -> None:
        match action:
            case policy.Launch():
                self._kill_requested.clear()
                in_place = action.in_place and self.view.can_start_again
                in_place = in_place and not self.health.must_leave
                in_place &= not self.launches.move_ranks(moves=action.moves_ranks)
                self.view = AttemptView.begin(self.view.number + 1, self._spec.hangs)
                if not in_place:  # ignore messages from shims of the former launcher
                    self._launch_again()
                self.tasks.spawn(self._attempt(in_place=in_place))
            case policy.Terminate():
                if not self.view.rank_pids:  # there is no rank yet
                    self._kill()
                elif not self._nodes.send({"kind": "terminate", "attempt": self.view.number}):
                    self._nodes.kill()
            case policy.Kill():
                self._kill()
            case policy.Diagnose():
                self.tasks.spawn(self._diagnose())
            case policy.RequestFinalSave():
                self.stopping.ask_ranks(self.view)
            case Skip():
                self._recorder.leave_out(action)
            case policy.Replay():
                self.casework.replay()
            case policy.Resolve():
                self.casework.resolve(action)
            case policy.End():
                self._end(action)

    def _launch_again(self) -> None:
        """Record that the attempt needs new launchers, even if the policy would keep the old ones."""
        self.launches.attempt = self.view.number
        self.state = replace(self.state, in_place=False)

    def _failed(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _kill(self) -> None:
        self.view.killed = True
        self._kill_requested.set()
        number = self.view.number
        if self.state.stop_by is not None or not self.view.can_start_again:
            self._nodes.kill()
            return

        def kill_all(*, swept: bool) -> None:
            ended = self.view.all_ended if swept else self.view.all_exited
            if self.view.number == number and not ended:
                self._nodes.kill()

        self._nodes.send({"kind": "kill", "attempt": number}, to="shim")
        loop = asyncio.get_running_loop()
        loop.call_later(KILL_TIMEOUT_S, functools.partial(kill_all, swept=False))
        loop.call_later(SWEEP_TIMEOUT_S, functools.partial(kill_all, swept=True))

    async def _attempt(self, *, in_place: bool) -> None:
        chosen = None
        if self._rollback is not None:  # the ranks have ended: none saves meanwhile
            await self._go_back(self._rollback)
        if in_place and self._tests.is_due and await self._tests.run(self._kill_requested):
            in_place = False
            self._launch_again()
        if not in_place:
            found = await self.launches.choose(self._kill_requested)
            if not isinstance(found, tuple):
                self.decide_on(found)
                return
            chosen = found
        self._all_ended.clear()
        self.stopping.restart()
        self.speed.restart()
        number = self.view.number
        self._follow_logs()
        self._recorder.attempt_began(number)
        self._observe("launch", {"attempt": number, "in_place": in_place})
        self.launches.start(number, chosen)
        if self._kill_requested.is_set():  # the failure came during the start
            self._kill()
        await self._see_through()

    async def _see_through(self) -> None:
        """Wait for the end of the attempt, and record the end."""
        returncode = await self._end_of_attempt()
        self._recorder.observed(self.view.observations(self._clock.now_s()))
        if self.view.dropped_log_bytes:
            self._recorder.event("log_dropped", {"bytes": self.view.dropped_log_bytes})
        is_moving = self.state.is_moving and self.state.phase is policy.Phase.LEAVING
        is_left = is_moving or self.state.goes_back_to is not None
        stopping = self.state.stop_by is not None or is_left
        outcome = "stopped" if stopping else "completed" if returncode == 0 else "failed"
        self._recorder.attempt_ended(outcome=outcome, last_step=self.view.last_step)
        self.decide_on(policy.JobExited(returncode))

    async def _end_of_attempt(self) -> int:
        """Wait until no trainer is left; return 0 if all trainers ended with code 0.

        The launchers and shims keep running if the next attempt can use them.
        """
        ended = asyncio.create_task(self._all_ended.wait())
        over = asyncio.create_task(self._nodes.all_launchers_ended())
        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        failure = self.view.first_failure
        if (
            not over.done()
            and failure is not None
            and self.state.stop_by is None
            and self.view.can_start_again
        ):
            over.cancel()
            return failure.exit_code or -(failure.signal or 0)
        if not over.done():
            self._nodes.send({"kind": "leave"}, to="shim")
        return await over

    def _follow_logs(self) -> None:
        self._logs.close()
        self._logs = self._follower()
        self.tasks.spawn(self._logs.follow())

    def _follower(self) -> LogFollower:
        logs = self._paths.attempt_logs(self.view.number)
        return LogFollower(logs, lambda: Known.of_ledger(self._ledger, self._paths.home))

    async def _diagnose(self) -> None:
        failure = self.launches.failed(await self.casework.diagnose(self.view, self._logs))
        self._tests.suspect(self.casework.suspects())
        self._tests.failed(self.view, self.casework)
        self.decide_on(self.health.failed(failure, self.casework))
        self.health.explain(self.casework)
        if failure.waits_for_outside:
            outage = Outage(self.decide_on, self._observe, self.casework.add)
            is_waiting = functools.partial(self._is_waiting_after, self.view.number)
            own = {name for node in self._nodes.connected for name in (node.name, node.address)}
            probed = named_in(self.casework.evidence, own=own)
            await outage.probe(probed, is_waiting)

    def _is_waiting_after(self, attempt: int) -> bool:
        return self.state.phase is policy.Phase.WAITING and self.view.number == attempt

    def _end(self, end: policy.End) -> None:
        step = self._losses.not_finite_since
        if end.state == "completed" and step is not None:
            doubt = f"Its loss is not finite since step {step}: check its last checkpoint before you use it."
            end = replace(end, outcome=f"{end.outcome} {doubt}")
        outcome = outcome_of(
            end,
            run_id=self._paths.run_id,
            spec=self._spec,
            view=self.view,
            recorder=self._recorder,
        )
        self._recorder.run_ended(
            state=outcome.state, exit_code=outcome.exit_code, outcome=outcome.sentence
        )
        self._observe("ended", {"state": outcome.state, "outcome": outcome.sentence})
        self.over(outcome)
