"""Simulate a training job under virtual time; the live policy makes the decisions.

The clock jumps from event to event. Failures strike while the job has processes. Every observation
that a supervisor would make is passed to `recover.policy.decide`, and the simulation carries out
the returned actions: kill, diagnose, replay, leave batches out, wait, launch, end. If the policy
ends the run, a person removes the cause and resumes the run.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.core.accounting import LostCause
from holdfast.recover.policy import (
    Action,
    Begin,
    CannotSave,
    Circumstances,
    Diagnose,
    Diagnosed,
    End,
    Event,
    JobExited,
    JobFrozen,
    Launch,
    LossBroken,
    NodeToLeave,
    Phase,
    RankFailed,
    RequestFinalSave,
    Skip,
    State,
    StateSaved,
    StopRequested,
    Terminate,
    Tick,
    decide,
    plan_for,
)
from holdfast.simulate.pretrain.account import Account, Outcome
from holdfast.simulate.pretrain.causes import DAY_S, Cause, LostMemory, cause, picked
from holdfast.simulate.pretrain.fleet import Fleet, Heat
from holdfast.simulate.pretrain.progress import Progress
from holdfast.simulate.pretrain.scenario import Scenario
from holdfast.simulate.pretrain.streams import Stream, draws, exponential

BATCHES_BEFORE = 2
"""The number of batches before the onset that the report of a broken loss includes."""


class _Over(Exception):
    """The simulated time is over."""


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """A failure that ends an attempt."""

    cause: Cause
    draw: random.Random
    node: int | None = None
    is_broken: bool = False
    """True if the failure recurs until the node is taken out."""


@dataclass
class _Broken:
    """A loss that broke after `work_s` of work, and will be detected at the time `alarm_s`."""

    failure: _Failure
    work_s: float
    alarm_s: float


def run(scenario: Scenario, seed: int, *, rate_factor: float = 1.0) -> Outcome:
    """Simulate one run.

    Args:
        scenario: the simulated scenario.
        seed: the seed of all random draws; equal seeds give bit-identical outcomes.
        rate_factor: a factor on the failure rates, to simulate uncertain rates.

    Raises:
        AssertionError: the seconds by cause do not add up to the simulated time.
    """
    return _Run(scenario, seed, rate_factor).outcome()


class _Run:
    def __init__(self, scenario: Scenario, seed: int, rate_factor: float) -> None:
        self._one, self._seed = scenario, seed
        self._now_s = 0.0
        self._end_s = scenario.days * DAY_S
        self._account = Account()
        self._progress = Progress(scenario.saves)
        self._fleet = Fleet(scenario.nodes, scenario.hardware, seed)
        self._heat = Heat(scenario.hardware, seed)
        gpus_a_node = scenario.gpus / scenario.nodes
        rates = scenario.rates
        self._node_rate = (
            rates.per_gpu_day * gpus_a_node * rate_factor / DAY_S / self._fleet.mean_factor()
        )
        self._job_rate = rates.per_job_day * rate_factor / DAY_S
        self._spike_rate = scenario.spikes_per_day / DAY_S
        self._slow_rate = scenario.slow_per_node_day * scenario.nodes / DAY_S
        names = ("node", "again", "job", "spike", "slow")
        self._streams = {name: Stream(seed, name) for name in names}
        self._state = State()
        self._broken: _Broken | None = None
        self._bad_data_s: float | None = None
        """The work after which the loss breaks again, until the bad batches are left out."""
        self._fault: tuple[float, Cause] | None = None
        """The work after which the same error ends the job again, until a person corrects the
        error.
        """
        self._slow: tuple[int, float] | None = None
        """The slow node, and the time at which its slowness is detected."""
        self._failed: _Failure | None = None
        self._go_back_before_s: float | None = None
        self._mended_by_person = False
        self._new_nodes = False
        self._suspects = self._tests_due = False
        """If a replay passed, the nodes are suspects, and are tested after the next failure."""
        self._interventions = self._launches = self._decisions = self._restores = 0
        self._attempt_from_s = 0.0

    def outcome(self) -> Outcome:
        completed = False
        try:
            actions: Sequence[Action] = self._send(Begin())
            while not completed:
                launch = self._until_launch(actions)
                failure = self._attempt(launch)
                if failure is None:
                    self._send(JobExited(0))
                    completed = True
                elif isinstance(failure, _Failure):
                    actions = self._after(failure)
                else:
                    actions = failure
        except _Over:
            pass
        one = self._one
        return Outcome(
            lost_time=self._account.lost_time(one.gpus, self._now_s),
            incidents=tuple(self._account.incidents),
            wall_s=self._now_s,
            work_s=self._progress.work_s,
            completed=completed,
            interventions=self._interventions,
            restarts=max(self._launches - 1, 0),
            decisions=self._decisions,
            nodes_out=self._fleet.most_held,
        )

    # The clock

    @property
    def _incident(self) -> int:
        return len(self._account.incidents)

    def _pass(self, cause_: LostCause, seconds: float) -> None:
        """Advance the clock while no process runs that could fail; the last incident is charged."""
        span_s = min(seconds, self._end_s - self._now_s)
        self._account.add(cause_, span_s, self._incident)
        self._now_s += span_s
        if span_s < seconds:
            raise _Over

    def _expose(
        self, seconds: float, spend: Callable[[float], None], *, trains: bool = False
    ) -> str | None:
        """Advance the clock while failures can strike.

        Args:
            seconds: the longest time to advance.
            spend: called with the seconds of each span, to record their use.
            trains: True if the job trains, so that also loss spikes and slow nodes can occur.

        Returns:
            The name of the stream of failures that struck; None after `seconds` without a failure.
        """
        until_s = self._now_s + seconds
        while True:
            heat, changes_s = self._heat.at(self._now_s)
            rates = {
                "node": self._node_rate * self._fleet.weight * heat,
                "again": len(self._fleet.broken) / self._one.hardware.again_s,
                "job": self._job_rate,
            }
            if trains:
                if self._broken is None:
                    rates["spike"] = self._spike_rate
                if self._slow is None:
                    rates["slow"] = self._slow_rate
            next_s, struck = min(until_s, changes_s, self._end_s), None
            for name, rate in rates.items():
                if rate > 0.0:
                    at_s = self._now_s + self._streams[name].remaining / rate
                    if at_s < next_s:
                        next_s, struck = at_s, name
            span_s = next_s - self._now_s
            for name, rate in rates.items():
                stream = self._streams[name]
                stream.remaining = max(stream.remaining - rate * span_s, 0.0)
            spend(span_s)
            self._now_s = next_s
            if struck is not None:
                return struck
            if next_s >= self._end_s:
                raise _Over
            if next_s >= until_s:
                return None

    # The policy

    def _send(self, event: Event) -> tuple[Action, ...]:
        self._decisions += 1
        self._state, actions = decide(self._one.limits, self._state, event, self._now_s)
        return actions

    def _until_launch(self, actions: Sequence[Action]) -> Launch:
        """Carry out actions until the next launch; if the policy ends the run, a person resumes it."""
        while True:
            for action in actions:
                if isinstance(action, Skip):
                    self._bad_data_s = None
                elif isinstance(action, Launch):
                    return action
            if any(isinstance(action, End) for action in actions):
                self._wait_for_person()
                self._state = State()
                actions = self._send(Begin())
            else:
                assert self._state.phase is Phase.WAITING, self._state.phase
                deadline_s = self._state.deadline_s or self._now_s
                self._pass("backoff", max(deadline_s - self._now_s, 0.0))
                self._now_s = max(self._now_s, deadline_s)
                actions = self._send(Tick())

    def _wait_for_person(self) -> None:
        people = self._one.people
        self._interventions += 1
        draw = draws(self._seed, "people", self._interventions)
        acts_s = people.awake_at(self._now_s) + exponential(draw.random(), people.response_s)
        self._pass("not_running", people.awake_at(acts_s) - self._now_s)
        self._mended_by_person = True
        self._fault = None
        self._bad_data_s = None
        if draw.random() < people.person_finds_node:
            self._take_out_broken()

    def _take_out_broken(self) -> None:
        for node in sorted(self._fleet.broken):
            self._take_out(node)

    def _take_out(self, node: int) -> None:
        self._fleet.take_out(node, self._now_s)
        self._new_nodes = True
        if self._slow is not None and self._slow[0] == node:
            self._slow = None

    # An attempt

    def _attempt(self, launch: Launch) -> _Failure | tuple[Action, ...] | None:
        """Simulate one attempt.

        Returns:
            The failure that ended the attempt; the policy's actions if the job was moved off a slow
            node; None if all work is done.
        """
        self._find_nodes()
        times = self._one.times
        # A replay runs each rank on a different node, which needs new launchers.
        moves = launch.moves_ranks and self._one.nodes > 1
        in_place = launch.in_place and not moves and not self._new_nodes
        restore_s = self._restore()
        self._attempt_from_s = self._progress.work_s
        self._new_nodes = self._mended_by_person = False
        self._launches += 1
        start_s = times.start_in_place_s if in_place else times.start_s
        phases: tuple[tuple[LostCause, float], ...] = (
            ("start", start_s),
            ("restore", restore_s),
            ("first_step", times.first_step_s),
        )
        for name, seconds in phases:
            ends_s = self._now_s + seconds
            spend = partial(self._spend_start, name)
            while (struck := self._expose(max(ends_s - self._now_s, 0.0), spend)) is not None:
                if (failure := self._strikes(struck)) is not None:
                    return failure
        return self._train()

    def _find_nodes(self) -> None:
        """Test the nodes after a hardware failure, and replace missing nodes by spares."""
        failed, self._failed = self._failed, None
        node = None if failed is None else failed.node
        if (node is not None or self._tests_due) and not self._mended_by_person:
            self._tests_due = False
            self._pass("node_tests", self._one.times.node_tests_s)
            if failed is not None and node is not None and failed.is_broken:
                self._judge(failed, node)
        while (back_s := self._fleet.fill(self._now_s)) is not None:
            self._pass("nodes_missing", max(back_s - self._now_s, 0.0))
            self._now_s = max(self._now_s, back_s)

    def _judge(self, failed: _Failure, node: int) -> None:
        """Take out the node that tests blame: the broken node, a healthy one by mistake, or none."""
        if node not in self._fleet.broken:
            return
        hardware, luck = self._one.hardware, failed.draw.random()
        if failed.cause.loses == "node" or luck < hardware.finds_node:
            self._take_out(node)
        elif luck < hardware.finds_node + hardware.blames_other:
            self._take_out(self._fleet.culprit(failed.draw.random()))

    def _restore(self) -> float:
        """Go back to the newest state that can be restored; return the seconds of the restore."""
        progress, saves = self._progress, self._one.saves
        if not self._launches or not self._one.loses_work:
            progress.stay()
            return min(tier.restore_s for tier in saves.tiers) if self._launches else 0.0
        self._restores += 1
        older = 0
        if saves.damaged:
            draw = draws(self._seed, "damage", self._restores)
            while draw.random() < saves.damaged:
                older += 1
        if older and not saves.verifies:
            self._pass("start", self._one.times.start_s)
            self._wait_for_person()
        before_s = self._go_back_before_s
        self._go_back_before_s = None
        if before_s is None:
            state_s, tier = progress.best(older=older)
        else:
            state_s, tier = progress.best(before_s=before_s, older=older)
        self._account.take_back(progress.go_back(state_s), self._incident)
        if self._broken is not None and state_s <= self._broken.work_s:
            self._broken = None
        return tier.restore_s if state_s > 0 else 0.0

    def _train(self) -> _Failure | tuple[Action, ...] | None:
        if self._broken is not None:
            self._broken.alarm_s = self._now_s + self._one.times.spike_s
        if self._slow is not None:
            self._progress.speed = self._one.slow_speed
        while True:
            seconds, goal = min(self._goals())
            struck = self._expose(seconds, self._spend_training, trains=True)
            if struck is None and goal == "done":
                return None
            ended = self._strikes(struck) if struck is not None else self._reached(goal)
            if ended is not None:
                return ended

    def _goals(self) -> Iterator[tuple[float, str]]:
        """Yield the seconds until each event whose time is known already, with the event's name."""
        one, progress = self._one, self._progress
        yield self._end_s - self._now_s, "end"
        if one.work_s is not None:
            yield progress.seconds_to(one.work_s), "done"
        if self._broken is not None:
            yield max(self._broken.alarm_s - self._now_s, 0.0), "alarm"
        elif self._bad_data_s is not None and self._bad_data_s > progress.work_s:
            yield progress.seconds_to(self._bad_data_s), "bad data"
        if self._fault is not None and self._fault[0] > progress.work_s:
            yield progress.seconds_to(self._fault[0]), "fault"
        if self._slow is not None:
            yield max(self._slow[1] - self._now_s, 0.0), "slow seen"

    def _reached(self, goal: str) -> _Failure | tuple[Action, ...] | None:
        """Process a known event; return what ends the attempt, or None if training continues."""
        if goal == "alarm":
            return self._alarm()
        if goal == "slow seen":
            return self._leave_slow()
        draw = draws(self._seed, f"{goal} again", self._launches)
        if goal == "bad data":
            self._break(_Failure(cause=cause("loss spike"), draw=draw))
            return None
        assert self._fault is not None, goal
        return _Failure(cause=self._fault[1], draw=draw)

    def _strikes(self, name: str) -> _Failure | None:
        """Process a random event; return the failure that ends the attempt, or None to continue."""
        if name == "spike":
            draw = self._drawn(name)
            if draw.random() < self._one.bad_data:
                self._bad_data_s = self._progress.work_s
            self._break(_Failure(cause=cause("loss spike"), draw=draw))
            return None
        if name == "slow":
            draw = self._drawn(name)
            node = self._fleet.culprit(draw.random())
            self._slow = (node, self._seen_s(self._one.times.slow_s, draw))
            self._progress.speed = self._one.slow_speed
            return None
        failure = self._struck(name)
        if failure.cause.shows == "nan":
            if self._broken is None:
                self._break(failure)
            return None
        return failure

    def _spend_start(self, phase: LostCause, span_s: float) -> None:
        self._account.add(phase, span_s, self._incident)

    def _spend_training(self, span_s: float) -> None:
        used = self._progress.advance(self._now_s, span_s)
        self._account.add("trained", used.trained_s)
        self._account.add("saves", used.stalled_s)

    def _drawn(self, name: str) -> random.Random:
        stream = self._streams[name]
        draw = stream.draw
        stream.next_event()
        return draw

    def _struck(self, name: str) -> _Failure:
        """Draw the details of a failure of the stream `name`."""
        draw = self._drawn(name)
        if name == "job":
            found = picked(self._one.rates.job_mix, draw.random())
            if not found.restart_helps:
                self._fault = (self._progress.work_s, found)
            return _Failure(cause=found, draw=draw)
        if name == "again":
            nodes = sorted(self._fleet.broken)
            node = nodes[int(draw.random() * len(nodes))]
            return _Failure(cause=self._fleet.broken[node], draw=draw, node=node, is_broken=True)
        found = picked(self._one.rates.node_mix, draw.random())
        node = self._fleet.culprit(draw.random())
        is_broken = draw.random() < found.needs_node
        if is_broken:
            self._fleet.broken[node] = found
        return _Failure(cause=found, draw=draw, node=node, is_broken=is_broken)

    # Detection and its consequences

    def _seen_s(self, delay_s: float, draw: random.Random) -> float:
        """Return the time at which people or the supervisor detect a fault that ends no process."""
        if not self._one.by_hand:
            return self._now_s + delay_s
        return self._one.people.awake_at(self._now_s + exponential(draw.random(), delay_s))

    def _break(self, failure: _Failure) -> None:
        alarm_s = self._seen_s(self._one.times.spike_s, failure.draw)
        self._broken = _Broken(failure, self._progress.work_s, alarm_s)

    def _alarm(self) -> _Failure | None:
        """Report a broken loss to the policy; return its failure, or None if training continues."""
        broken = self._broken
        assert broken is not None
        is_spike = broken.failure.cause.shows == "spike"
        healthy_s = self._healthy_s(broken.work_s)
        actions = self._send(
            LossBroken(
                step=self._step(self._progress.work_s),
                is_spike=is_spike,
                can_go_back=healthy_s > 0,
                batches=self._batches(broken.work_s),
            )
        )
        if not actions:  # training continues in spite of the spike
            self._broken = self._bad_data_s = None
            return None
        return broken.failure

    def _healthy_s(self, work_s: float) -> float:
        self._progress.settle(self._now_s, "none")
        return self._progress.best(before_s=work_s)[0]

    def _step(self, work_s: float) -> int:
        return int(work_s / self._one.step_s)

    def _batches(self, work_s: float) -> tuple[int, int]:
        onset = self._step(work_s) + 1
        return max(onset - BATCHES_BEFORE, 1), onset

    def _leave_slow(self) -> tuple[Action, ...] | None:
        """Let the policy decide whether to leave a slow node.

        Returns:
            The policy's actions after the move; None if the job stays on the node.
        """
        assert self._slow is not None
        node = self._slow[0]
        if self._one.by_hand:
            self._account.incidents.append("slow node")
            self._interventions += 1
            self._send(StopRequested(by="a person"))
            self._send(CannotSave())
            self._progress.settle(self._now_s, "process")
            self._send(JobExited(0))
            self._take_out(node)
            self._mended_by_person = True
            self._state = State()
            return self._send(Begin())
        has_spare = bool(self._fleet.spares)
        if plan_for("confirmed", "healthy", Circumstances(has_spare=has_spare)) != "move":
            self._slow = (node, self._now_s + DAY_S)
            return None
        actions = self._send(NodeToLeave(node=str(node), why="It is slow.", rule="slow"))
        if not any(isinstance(action, RequestFinalSave) for action in actions):
            self._slow = (node, self._now_s + DAY_S)
            return None
        self._account.incidents.append("slow node")
        self._pass("saves", self._one.saves.stall_s)
        self._send(StateSaved())
        self._pass("teardown", self._one.times.teardown_s)
        self._progress.stay()
        self._take_out(node)
        return self._send(JobExited(0))

    def _after(self, failure: _Failure) -> tuple[Action, ...]:
        """Simulate detection, teardown and diagnosis of a failure; return the policy's actions."""
        one, times = self._one, self._one.times
        found = failure.cause
        self._account.incidents.append(found.name)
        self._failed = failure
        self._tests_due, self._suspects = self._suspects, False
        self._fleet_slow_again()
        shows = found.shows
        if shows == "exit" and failure.draw.random() < one.hangs:
            shows = "hang"
        began_s = self._now_s
        loses: LostMemory = found.loses
        # False if the launch failed before its first step, and so saved nothing either.
        has_stepped = self._progress.work_s > self._attempt_from_s
        reached_s = self._progress.work_s
        if shows in ("exit", "hang"):
            self._progress.settle(began_s, loses)
            if shows == "hang":
                self._pass("detection", times.hang_s)
                ended = self._send(JobFrozen())
            else:
                self._pass("detection", times.node_s if loses == "node" else times.exit_s)
                ended = self._send(RankFailed())
            self._tear_down(ended)
        else:
            self._pass("teardown", times.teardown_s)  # the policy has already ended the job
        actions = self._send(JobExited(1))
        assert any(isinstance(action, Diagnose) for action in actions), actions
        self._pass("diagnosis", times.diagnosis_s)
        return self._send(self._diagnosed(failure, shows, reached_s, has_stepped=has_stepped))

    def _fleet_slow_again(self) -> None:
        """Replace a slow node for which there was no spare before, if there is one now."""
        if self._slow is not None and not self._one.by_hand and self._fleet.spares:
            node, seen_s = self._slow
            if seen_s - self._now_s > DAY_S / 2 and len(self._fleet.job) == self._fleet.size:
                self._take_out(node)

    def _tear_down(self, actions: Sequence[Action]) -> None:
        seconds, grace_s = self._one.times.teardown_s, self._one.limits.teardown_grace_s
        if any(isinstance(action, Terminate) for action in actions) and seconds > grace_s:
            self._pass("teardown", grace_s)
            self._send(Tick())
            seconds -= grace_s
        self._pass("teardown", seconds)

    def _diagnosed(
        self, failure: _Failure, shows: str, reached_s: float, *, has_stepped: bool
    ) -> Diagnosed:
        found = failure.cause
        helps = found.restart_helps
        if failure.draw.random() >= self._one.recognised:
            helps = not helps
        newest_s, _ = self._progress.best()
        step = self._step(reached_s)
        saved = self._step(newest_s) if newest_s > self._attempt_from_s else None
        restored = self._step(self._attempt_from_s)
        common = {
            "fingerprint": found.name,
            "step": step,
            "has_stepped": has_stepped,
            "summary": f"{found.name}.",
            "mitigation": "Mend it.",
            "waits_for_outside": found.waits_for_outside,
            "restored_step": restored,
        }
        if shows not in ("spike", "nan"):
            return Diagnosed(**common, checkpoint_step=saved, restart_helps=helps)  # type: ignore[arg-type]
        broken = self._broken
        assert broken is not None
        healthy_s = self._healthy_s(broken.work_s)
        self._go_back_before_s = broken.work_s
        again = self._state.is_replay
        self._suspects = shows == "nan" and not again and self._one.nodes > 1
        return Diagnosed(
            **common,  # type: ignore[arg-type]
            checkpoint_step=self._step(healthy_s) if healthy_s > 0 else None,
            restart_helps=healthy_s > 0,
            healthy_step=self._step(healthy_s) if healthy_s > 0 else None,
            batches=self._batches(broken.work_s) if healthy_s > 0 else None,
            replays=not again,
        )
