"""What to do next: a pure function over an explicit table.

`decide(limits, state, event) -> (state, actions)`. The supervisor tells it what happened and does what it says; it
runs in the same way under a virtual clock. `TABLE` is the whole of it: a pair of phase and event that is not there
changes nothing.

An attempt has gained something when it reached a higher step than every attempt before it, or when a newer checkpoint
became durable. Where it began from an older checkpoint than the newest known one, that one is lost, and gains count
from the older one. Where a job reports neither steps nor checkpoints, an attempt that lived for `blind_gain_s` has
gained.

A broken loss ends the attempt: the next one goes on from a healthy checkpoint, and leaves out the batches that led to
the loss, where the ranks report them (`skipping.plan`). Where no more batches are left out, a spike of the loss that
comes again about the same step comes from the data or the settings: the training goes on from there, as where there is
no healthy checkpoint; and a loss that is not finite again, at the same step or before a newer checkpoint was healthy,
ends the run.

A restart is worth it when the diagnosis says so, the budget is not spent, and the same root did not already strike
since something was gained last, at the same place: before an attempt's first step, or after it. The budget counts the
restarts in a row that gained nothing; a run that gains goes on for ever. The first restart after a gain is immediate;
each further one waits twice as long as the one before. What lies outside the job (storage, network) may strike a few
times without a gain, since waiting can mend it; so may a kill from outside, since two kills can hit one stretch between
checkpoints; and so may any root of a job that reports neither steps nor checkpoints, since its gains cannot be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast.recover.skipping.plan import Skip, Skipping


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How often, how fast and how long; the defaults suit a run of days."""

    max_restarts: int = 20
    """So many restarts in a row that gained nothing, within `window_s`, end the run; 0: the first failure does."""
    window_s: float = 3600.0
    backoff_first_s: float = 2.0
    backoff_max_s: float = 300.0
    outside_wait_s: float = 30.0
    """The first wait where the cause lies outside the job (storage, network) and must pass by itself."""
    outside_retries: int = 4
    """How often such a cause, or a kill from outside, may strike without a gain."""
    blind_retries: int = 10
    """How often any cause may strike a job that reports neither steps nor checkpoints, without a gain."""
    blind_gain_s: float = 600.0
    """How long an attempt of such a job must live to have gained something: longer than most jobs need to start."""
    teardown_grace_s: float = 10.0
    """How long the ranks may take to end by themselves, after one failed or when all saved: for last words."""
    stop_grace_s: float = 60.0
    """How long a stop may take to save state first."""


KEPT = "It failed before its first step below a launcher that was kept, which may be why: a new one is started."
BROKEN_SLACK = 3
"""A loss that breaks again may be certain so many steps later than before."""
MAX_DOUBLINGS = 30
"""A wait is not doubled more often; it is at its bound long before."""


class Phase(Enum):
    """Where a run is."""

    IDLE = "idle"
    RUNNING = "running"
    FAILING = "failing"
    """A rank failed; the others are asked to end."""
    DIAGNOSING = "diagnosing"
    WAITING = "waiting"
    """Before a restart."""
    STOPPING = "stopping"
    """Asked to stop: the ranks save their state."""
    LEAVING = "leaving"
    """Asked to stop, and the ranks are ending or being ended."""
    ENDED = "ended"


# Events


@dataclass(frozen=True)
class Begin:
    """Start the run, or go on with one."""


@dataclass(frozen=True)
class Adopted:
    """Go on with an attempt that the supervisor before this one has launched."""

    in_place: bool
    """Whether that attempt began below the launchers of the one before."""


@dataclass(frozen=True)
class NodesMissing:
    """There are too few nodes for a launch, for too long."""

    outcome: str
    """How many are missing, a sentence."""


@dataclass(frozen=True)
class RankFailed:
    """A rank ended by a signal or with a code other than 0."""


@dataclass(frozen=True)
class JobFrozen:
    """The job stands still."""


@dataclass(frozen=True)
class LossBroken:
    """The loss shows that the state of the training is broken."""

    step: int
    """The step at which that was certain."""
    is_spike: bool
    """Whether the loss is a finite number; the training can go on from there."""
    can_go_back: bool = True
    """Whether there is a healthy checkpoint."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led there; None where the ranks report none."""


@dataclass(frozen=True)
class JobExited:
    """Every trainer ended, with all that it had started."""

    returncode: int
    """0 if every trainer returned 0."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Why the job failed."""

    fingerprint: str
    """The same for the same root."""
    step: int | None
    """Steps completed by then; None where the job reports none."""
    has_stepped: bool = False
    """Whether the attempt completed a step."""
    checkpoint_step: int | None = None
    """The newest checkpoint that the attempt made durable; None where it made none."""
    summary: str
    """The cause, a sentence."""
    mitigation: str
    """What a person should do, a sentence."""
    restart_helps: bool
    waits_for_outside: bool = False
    killed_from_outside: bool = False
    """Whether a signal from outside ended a rank or the launcher, and the logs state no other root."""
    advises_only_restart: bool = True
    """Whether `mitigation` is advice for a run that is restarted, and so is left out where the run ends."""
    restored_step: int | None = None
    """Steps completed in the state that the attempt went on from; None where unknown."""
    healthy_step: int | None = None
    """For a broken loss, the step of the checkpoint to go back to: only what is healthy is a gain."""
    batches: tuple[int, int] | None = None
    """For a broken loss, the first and the last of the batches that led to the loss; None where they are not known."""

    @property
    def reached(self) -> int | None:
        """Return the step by which gains are counted."""
        return self.step if self.healthy_step is None else self.healthy_step


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the run to stop."""

    by: str


@dataclass(frozen=True)
class StateSaved:
    """Every rank saved its state for the stop and is leaving."""


@dataclass(frozen=True)
class CannotSave:
    """No rank has a Checkpointer at work, so there is nothing to wait for."""


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    Begin
    | Adopted
    | NodesMissing
    | RankFailed
    | JobFrozen
    | LossBroken
    | JobExited
    | Diagnosed
    | StopAsked
    | StateSaved
    | CannotSave
    | Tick
)

# Actions


@dataclass(frozen=True)
class Launch:
    """Start the job's processes."""

    in_place: bool = False
    """Whether the launcher that is there is kept, and only the trainers below it are started again."""


@dataclass(frozen=True)
class Kill:
    """End every process of the job at once."""


@dataclass(frozen=True)
class Terminate:
    """Ask every rank to end with SIGTERM, so that its own handler can run."""


@dataclass(frozen=True)
class Diagnose:
    """Find out why the job failed; answer with `Diagnosed`."""


@dataclass(frozen=True)
class AskRanksToSave:
    """Have all ranks save at the same step and leave; answer with `StateSaved` or `CannotSave`."""


@dataclass(frozen=True, kw_only=True)
class Resolve:
    """Record what is done about the incident just diagnosed."""

    action: str
    explanation: str
    rule: str = ""
    """The name of the rule that decides, see `core.explanation.plain_words.RULES`."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over."""

    state: str
    exit_code: int
    outcome: str


Action = Launch | Kill | Terminate | Diagnose | AskRanksToSave | Skip | Resolve | End


@dataclass(frozen=True, kw_only=True)
class State:
    """All that decisions depend on."""

    phase: Phase = Phase.IDLE
    deadline_s: float | None = None
    """When the present phase is over by itself, monotonic seconds."""
    launched_at_s: float = 0.0
    """When the present attempt began, monotonic seconds."""
    vain_at_s: tuple[float, ...] = ()
    """The failures in a row that followed on a restart and had gained nothing."""
    waits: int = 0
    """The failures in a row that a wait follows: those in vain, and of a blind job all that come soon."""
    roots_since_gain: tuple[tuple[str, bool], ...] = ()
    """The roots of the failures since the last gain, each with whether its attempt had completed a step."""
    best_step: int | None = None
    """The highest step at any failure, of those since newer checkpoints were lost."""
    best_checkpoint_step: int | None = None
    """The newest durable checkpoint at any failure, of those that are not lost."""
    rolled_back_to: int | None = None
    """The older checkpoint that an attempt began from when newer ones were lost last."""
    stop_by: str | None = None
    """Who asked to stop, once somebody did."""
    has_stepped: bool = False
    """Whether the last attempt that failed completed a step."""
    in_place: bool = False
    """Whether the present attempt began below the launcher of the one before."""
    spike_step: int | None = None
    """The step of the last spike of the loss that ended an attempt."""
    broken_step: int | None = None
    """The step of the last broken loss after which a healthy checkpoint was gone back to."""
    skipping: Skipping = field(default_factory=Skipping)
    """The batches that the attempts leave out."""


Decision = tuple[State, tuple[Action, ...]]


def decide(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    """The next state and what to do, given what happened at `now_s` (monotonic seconds)."""
    rule = TABLE.get((state.phase, type(event)))
    return rule(limits, state, event, now_s) if rule is not None else (state, ())


def rule_of(state: State, event: object) -> str:
    """Return the name of the rule by which `decide` goes for an event; empty where nothing changes."""
    rules = {
        (phase, kind): rule for (phase, kind), rule in TABLE.items() if isinstance(event, kind)
    }
    rule = next((rule for (phase, _), rule in rules.items() if phase is state.phase), None)
    return "" if rule is None else rule.__name__.strip("_").replace("_", "-")


def _launch(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    in_place = state.has_stepped
    running = replace(
        state, phase=Phase.RUNNING, deadline_s=None, launched_at_s=now_s, in_place=in_place
    )
    return running, (Launch(in_place=in_place),)


def _adopt(_limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, Adopted)
    in_place = event.in_place
    return replace(state, phase=Phase.RUNNING, launched_at_s=now_s, in_place=in_place), ()


def _give_up(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, NodesMissing)
    if state.stop_by is not None:
        return finish(state, _stopped(state))
    return finish(state, _failed(event.outcome))


def _await_teardown(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    failing = replace(state, phase=Phase.FAILING, deadline_s=now_s + limits.teardown_grace_s)
    return failing, (Terminate(),)


def _kill_frozen(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.FAILING, deadline_s=None), (Kill(),)


def _leave_broken_state(
    _limits: RestartLimits, state: State, event: Event, _now_s: float
) -> Decision:
    assert isinstance(event, LossBroken)
    known = state.spike_step is not None and event.step <= state.spike_step + BROKEN_SLACK
    in_vain = known and state.skipping.next_skip(event.batches) is None
    if event.is_spike and (in_vain or not event.can_go_back):
        return state, ()  # the same data bring it again: the training goes on from there
    spike_step = event.step if event.is_spike else state.spike_step
    failing = replace(state, phase=Phase.FAILING, deadline_s=None, spike_step=spike_step)
    return failing, (Kill(),)


def _kill_when_due(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    if state.deadline_s is None or now_s < state.deadline_s:
        return state, ()
    return replace(state, deadline_s=None), (Kill(),)


def _exited(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, JobExited)
    if event.returncode == 0 and state.phase is Phase.RUNNING:
        return finish(state, _completed())
    return replace(state, phase=Phase.DIAGNOSING, deadline_s=None), (Diagnose(),)


def _diagnosed(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, Diagnosed)
    if state.stop_by is not None:
        return _resolved(
            state,
            _stopped(state),
            f"{state.stop_by} asked to stop, so it was not restarted.",
            rule="stop-asked",
        )
    if state.in_place and not event.has_stepped:
        fresh, actions = _launch(limits, replace(state, has_stepped=False), event, now_s)
        why = f"{KEPT} {event.summary}"
        kept = Resolve(action="restart", explanation=why, rule="kept-launcher")
        return fresh, (kept, *actions)
    if not event.restart_helps:
        why = f"A restart does not mend this. {event.summary}"
        return _resolved(state, _failed(f"{why} {event.mitigation}"), why, rule="not-mended")
    skip = state.skipping.next_skip(event.batches)
    failed = after_failure(limits, state, event, now_s, skip=skip)
    if skip is None and failed.roots_since_gain.count(_place(event)) > _retries(
        limits, failed, event
    ):
        at = f"at step {event.step}" if event.step else "before the first step"
        why = f"The same root came back {at} after a restart that gained nothing. {event.summary}"
        advice = "" if event.advises_only_restart else f" {event.mitigation}"
        end = _failed(f"{why}{advice} Mend the cause, then `holdfast run --resume`.")
        return _resolved(failed, end, why, rule="same-root")
    recent = sum(now_s - at_s < limits.window_s for at_s in failed.vain_at_s)
    if recent >= limits.max_restarts:
        budget = f"The budget of {limits.max_restarts} restarts without a gain in {limits.window_s:g} s is spent."
        why = f"{budget} The last failure: {event.summary}"
        next_step = "Mend the cause, or raise --max-restarts, then `holdfast run --resume`."
        end = End(state="failed", exit_code=3, outcome=f"{why} {next_step}")
        return _resolved(failed, end, why, rule="budget-spent")
    waits = min(failed.waits, MAX_DOUBLINGS)
    if event.waits_for_outside:
        longer_s = min(limits.backoff_max_s, limits.outside_wait_s * 2**waits)
        wait_s = max(limits.outside_wait_s, longer_s)
    else:
        wait_s = (
            min(limits.backoff_max_s, limits.backoff_first_s * 2 ** (waits - 1)) if waits else 0.0
        )
    waited = f" after {wait_s:g} s" if wait_s else ""
    counted = (
        f", though {recent} of {limits.max_restarts} restarts gained nothing" if recent else ""
    )
    without = "" if skip is None else f" From now on {skip} of the data are left out."
    rule = "restart-after-wait" if wait_s else "restart"
    helps = f"A restart helps here{counted}{waited}.{without}"
    resolve = Resolve(action="restart", explanation=helps, rule=rule)
    resolving = (resolve,) if skip is None else (skip, resolve)
    waiting = replace(failed, phase=Phase.WAITING, deadline_s=now_s + wait_s)
    if wait_s == 0.0:
        relaunched, actions = _launch(limits, waiting, event, now_s)
        return relaunched, (*resolving, *actions)
    return waiting, resolving


def after_failure(
    limits: RestartLimits,
    state: State,
    failure: Diagnosed,
    now_s: float,
    *,
    skip: Skip | None = None,
) -> State:
    """Return `state` with what a failure at `now_s` shows of the attempt that began at `state.launched_at_s`."""
    state = _rolled_back(state, failure)
    gained = not state.roots_since_gain or _has_gained(limits, state, failure, now_s)
    lived_s = now_s - state.launched_at_s
    # Time alone shows no gain for sure: a blind job that fails again within `window_s` waits.
    in_doubt = (
        bool(state.roots_since_gain) and _is_blind(state, failure) and lived_s < limits.window_s
    )
    counts = skip is None  # else the next attempt trains on other data, and has not failed yet
    return replace(
        state,
        vain_at_s=() if gained else (*state.vain_at_s, *(now_s,) * counts),
        waits=0 if gained and not in_doubt else state.waits + counts,
        roots_since_gain=(_place(failure),)
        if gained
        else (*state.roots_since_gain, *(_place(failure),) * counts),
        best_step=_higher(state.best_step, failure.reached),
        best_checkpoint_step=_higher(state.best_checkpoint_step, failure.checkpoint_step),
        has_stepped=failure.has_stepped,
        broken_step=state.broken_step if failure.healthy_step is None else failure.step,
        skipping=state.skipping.after(skip, gained=gained),
    )


def _rolled_back(state: State, failure: Diagnosed) -> State:
    """Return `state` with gains counted from where the attempt began, where newer checkpoints are lost."""
    restored, newest = failure.restored_step, state.best_checkpoint_step
    # A second loss down to the same step shows that what was gained since the first one did not last.
    if restored is None or newest is None or restored >= newest or restored == state.rolled_back_to:
        return state
    if failure.reached is not None and failure.reached + 1 >= (state.best_step or 0):
        return state  # it came back to the best place, and is compared with that
    return replace(
        state, best_step=restored, best_checkpoint_step=restored, rolled_back_to=restored
    )


def _place(failure: Diagnosed) -> tuple[str, bool]:
    # A start and a loop are two places: what is killed twice from outside may meet one of each.
    return failure.fingerprint, failure.has_stepped


def _has_gained(limits: RestartLimits, state: State, failure: Diagnosed, now_s: float) -> bool:
    if _is_blind(state, failure):
        return now_s - state.launched_at_s >= limits.blind_gain_s
    if (
        failure.healthy_step is not None
        and state.broken_step is not None
        and failure.step is not None
        and failure.step <= state.broken_step + BROKEN_SLACK
    ):
        return False
    if failure.checkpoint_step is not None and failure.checkpoint_step > (
        state.best_checkpoint_step or 0
    ):
        return True
    # One step more is the same step: a rank's last report may die with it.
    return failure.reached is not None and failure.reached > (state.best_step or 0) + 1


def _is_blind(state: State, failure: Diagnosed) -> bool:
    known = (state.best_step, state.best_checkpoint_step, failure.step, failure.checkpoint_step)
    return all(step is None for step in known)


def _retries(limits: RestartLimits, failed: State, event: Diagnosed) -> int:
    if _is_blind(failed, event):
        return limits.blind_retries
    return limits.outside_retries if event.waits_for_outside or event.killed_from_outside else 1


def _higher(best: int | None, step: int | None) -> int | None:
    return max((each for each in (best, step) if each is not None), default=None)


def _launch_when_due(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.deadline_s is not None and now_s < state.deadline_s:
        return state, ()
    return _launch(limits, state, event, now_s)


def _save_first(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    stopping = replace(
        state, stop_by=event.by, phase=Phase.STOPPING, deadline_s=now_s + limits.stop_grace_s
    )
    return stopping, (AskRanksToSave(),)


def _let_leave(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), ()


def _terminate(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), (
        Terminate(),
    )


def _kill_leaving(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=None), (Kill(),)


def _stop_failing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    again = state.stop_by is not None
    return replace(state, stop_by=event.by), (Kill(),) if again else ()


def _stop_diagnosing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    if state.stop_by is not None:  # asked again: not even for the diagnosis
        return finish(state, _stopped(state))
    return replace(state, stop_by=event.by), ()


def _stop_waiting(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    return finish(state, _stopped(replace(state, stop_by=event.by)))


def _stopped_now(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return finish(state, _stopped(state))


def _completed() -> End:
    return End(state="completed", exit_code=0, outcome="The job completed.")


def _stopped(state: State) -> End:
    return End(state="stopped", exit_code=4, outcome=f"Stopped by {state.stop_by}.")


def _failed(outcome: str) -> End:
    return End(state="failed", exit_code=1, outcome=outcome)


def _resolved(state: State, end: End, why: str, *, rule: str) -> Decision:
    ended, actions = finish(state, end)
    return ended, (Resolve(action="stop", explanation=why, rule=rule), *actions)


def finish(state: State, how: End) -> Decision:
    """Return the state of a run that is over, and its end."""
    return replace(state, phase=Phase.ENDED, deadline_s=None), (how,)


Rule = Callable[[RestartLimits, State, Event, float], Decision]

TABLE: dict[tuple[Phase, type[Event]], Rule] = {
    (Phase.IDLE, Begin): _launch,
    (Phase.IDLE, Adopted): _adopt,
    (Phase.RUNNING, NodesMissing): _give_up,
    (Phase.STOPPING, NodesMissing): _give_up,
    (Phase.RUNNING, RankFailed): _await_teardown,
    (Phase.RUNNING, JobFrozen): _kill_frozen,
    (Phase.RUNNING, LossBroken): _leave_broken_state,
    (Phase.RUNNING, JobExited): _exited,
    (Phase.RUNNING, StopAsked): _save_first,
    (Phase.FAILING, Tick): _kill_when_due,
    (Phase.FAILING, JobExited): _exited,
    (Phase.FAILING, StopAsked): _stop_failing,
    (Phase.DIAGNOSING, Diagnosed): _diagnosed,
    (Phase.DIAGNOSING, StopAsked): _stop_diagnosing,
    (Phase.WAITING, Tick): _launch_when_due,
    (Phase.WAITING, StopAsked): _stop_waiting,
    (Phase.STOPPING, StateSaved): _let_leave,
    (Phase.STOPPING, CannotSave): _terminate,
    (Phase.STOPPING, RankFailed): _terminate,
    (Phase.STOPPING, StopAsked): _kill_leaving,
    (Phase.STOPPING, JobFrozen): _kill_leaving,
    (Phase.STOPPING, Tick): _kill_when_due,
    (Phase.STOPPING, JobExited): _stopped_now,
    (Phase.LEAVING, StopAsked): _kill_leaving,
    (Phase.LEAVING, Tick): _kill_when_due,
    (Phase.LEAVING, JobExited): _stopped_now,
}
"""Every pair that means something."""
