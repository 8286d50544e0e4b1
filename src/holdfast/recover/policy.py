"""What to do next: a pure function over an explicit table.

`decide(limits, state, event) -> (state, actions)`. The supervisor tells it what happened and does what it says; it
runs in the same way under a virtual clock. `TABLE` is the whole of it: a pair of phase and event that is not there
changes nothing.

A restart is worth it when the diagnosis says so, the budget of restarts within the window is not spent, and the
same root did not already fail at the same step. The first restart after progress is immediate; each further one
without progress waits twice as long as the one before. Only what lies outside the job (storage, network) may strike
again at the same step, a few times, since waiting can mend it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How often, how fast and how long; the defaults suit a run of days."""

    max_restarts: int = 20
    window_s: float = 3600.0
    backoff_first_s: float = 2.0
    backoff_max_s: float = 300.0
    outside_wait_s: float = 30.0
    """The first wait where the cause lies outside the job (storage, network) and must pass by itself."""
    outside_retries: int = 4
    """How often such a cause may strike at the same step."""
    teardown_grace_s: float = 10.0
    """How long the ranks may take to end by themselves, after one failed or when all saved: for last words."""
    stop_grace_s: float = 60.0
    """How long a stop may take to save state first."""


class Phase(Enum):
    """Where a run is."""

    IDLE = "idle"
    RUNNING = "running"
    FAILING = "failing"
    """A rank failed; the launcher is ending the others."""
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
class RankFailed:
    """A rank ended by a signal or with a code other than 0."""


@dataclass(frozen=True)
class JobFrozen:
    """The job stands still."""


@dataclass(frozen=True)
class JobExited:
    """The launcher and everything below it ended."""

    returncode: int


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Why the job failed."""

    fingerprint: str
    """The same for the same root."""
    step: int | None
    """Steps completed by then."""
    summary: str
    """The cause, a sentence."""
    mitigation: str
    """What a person should do, a sentence."""
    restart_helps: bool
    waits_for_outside: bool = False


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


Event = Begin | RankFailed | JobFrozen | JobExited | Diagnosed | StopAsked | StateSaved | CannotSave | Tick

# Actions


@dataclass(frozen=True)
class Launch:
    """Start the job's processes."""


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


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over."""

    state: str
    exit_code: int
    outcome: str


Action = Launch | Kill | Terminate | Diagnose | AskRanksToSave | Resolve | End


@dataclass(frozen=True, kw_only=True)
class State:
    """All that decisions depend on."""

    phase: Phase = Phase.IDLE
    deadline_s: float | None = None
    """When the present phase is over by itself, monotonic seconds."""
    restarts_at_s: tuple[float, ...] = ()
    """The restarts of the last window."""
    failed_at: tuple[tuple[str, int | None], ...] = ()
    """Every root that was restarted from, with the step it struck at."""
    last_failed_step: int | None = None
    in_vain: int = 0
    """Restarts in a row that gained no step."""
    stop_by: str | None = None
    """Who asked to stop, once somebody did."""


Decision = tuple[State, tuple[Action, ...]]


def decide(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    """The next state and what to do, given what happened at `now_s` (monotonic seconds)."""
    rule = TABLE.get((state.phase, type(event)))
    return rule(limits, state, event, now_s) if rule is not None else (state, ())


def _launch(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.RUNNING, deadline_s=None), (Launch(),)


def _await_teardown(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.FAILING, deadline_s=now_s + limits.teardown_grace_s), ()


def _kill_frozen(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.FAILING, deadline_s=None), (Kill(),)


def _kill_when_due(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    if state.deadline_s is None or now_s < state.deadline_s:
        return state, ()
    return replace(state, deadline_s=None), (Kill(),)


def _exited(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, JobExited)
    if event.returncode == 0 and state.phase is Phase.RUNNING:
        return _ended(state, _completed())
    return replace(state, phase=Phase.DIAGNOSING, deadline_s=None), (Diagnose(),)


def _diagnosed(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, Diagnosed)
    if state.stop_by is not None:
        return _resolved(state, _stopped(state), f"{state.stop_by} asked to stop, so it was not restarted.")
    at = f"at step {event.step}" if event.step is not None else "before the first step"
    if not event.restart_helps:
        why = f"A restart does not mend this. {event.summary}"
        return _resolved(state, _failed(f"{why} {event.mitigation}"), why)
    if _times_struck(state, event) >= (limits.outside_retries if event.waits_for_outside else 1):
        why = f"The same root came back {at} after a restart. {event.summary}"
        return _resolved(state, _failed(f"{why} {event.mitigation}"), why)
    recent = tuple(at_s for at_s in state.restarts_at_s if now_s - at_s < limits.window_s)
    if len(recent) >= limits.max_restarts:
        budget = f"The budget of {limits.max_restarts} restarts in {limits.window_s:g} s is spent."
        why = f"{budget} The last failure: {event.summary}"
        next_step = "Mend the cause, or raise --max-restarts, then `holdfast run --resume`."
        return _resolved(state, End(state="failed", exit_code=3, outcome=f"{why} {next_step}"), why)
    gained = state.last_failed_step is None or (event.step or 0) > state.last_failed_step
    in_vain = 0 if gained else state.in_vain + 1
    if event.waits_for_outside:
        longer_s = min(limits.backoff_max_s, limits.outside_wait_s * 2**in_vain)
        wait_s = max(limits.outside_wait_s, longer_s)
    else:
        wait_s = min(limits.backoff_max_s, limits.backoff_first_s * 2 ** (in_vain - 1)) if in_vain else 0.0
    waited = f" after {wait_s:g} s" if wait_s else ""
    why = f"A restart helps here: restart {len(recent) + 1} of {limits.max_restarts} in this window{waited}."
    waiting = replace(
        state,
        phase=Phase.WAITING,
        deadline_s=now_s + wait_s,
        restarts_at_s=(*recent, now_s),
        failed_at=(*state.failed_at, (event.fingerprint, event.step)),
        last_failed_step=max(event.step or 0, state.last_failed_step or 0),
        in_vain=in_vain,
    )
    resolve = Resolve(action="restart", explanation=why)
    if wait_s == 0.0:
        relaunched, actions = _launch(limits, waiting, event, now_s)
        return relaunched, (resolve, *actions)
    return waiting, (resolve,)


def _times_struck(state: State, event: Diagnosed) -> int:
    # One step either way is the same step: a rank's last report may die with it.
    return sum(
        fingerprint == event.fingerprint and abs((step or 0) - (event.step or 0)) <= 1
        for fingerprint, step in state.failed_at
    )


def _launch_when_due(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.deadline_s is not None and now_s < state.deadline_s:
        return state, ()
    return _launch(limits, state, event, now_s)


def _save_first(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    stopping = replace(state, stop_by=event.by, phase=Phase.STOPPING, deadline_s=now_s + limits.stop_grace_s)
    return stopping, (AskRanksToSave(),)


def _let_leave(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), ()


def _terminate(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), (Terminate(),)


def _kill_leaving(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=None), (Kill(),)


def _stop_failing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    again = state.stop_by is not None
    return replace(state, stop_by=event.by), (Kill(),) if again else ()


def _stop_diagnosing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    if state.stop_by is not None:  # asked again: not even for the diagnosis
        return _ended(state, _stopped(state))
    return replace(state, stop_by=event.by), ()


def _stop_waiting(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopAsked)
    return _ended(state, _stopped(replace(state, stop_by=event.by)))


def _exited_stopping(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, JobExited)
    if event.returncode == 0:  # by itself, before the ranks agreed on where to stop
        return _ended(state, _completed())
    return _ended(state, _stopped(state))


def _stopped_now(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return _ended(state, _stopped(state))


def _completed() -> End:
    return End(state="completed", exit_code=0, outcome="The job completed.")


def _stopped(state: State) -> End:
    return End(state="stopped", exit_code=4, outcome=f"Stopped by {state.stop_by}.")


def _failed(outcome: str) -> End:
    return End(state="failed", exit_code=1, outcome=outcome)


def _resolved(state: State, end: End, why: str) -> Decision:
    ended, actions = _ended(state, end)
    return ended, (Resolve(action="stop", explanation=why), *actions)


def _ended(state: State, end: End) -> Decision:
    return replace(state, phase=Phase.ENDED, deadline_s=None), (end,)


Rule = Callable[[RestartLimits, State, Event, float], Decision]

TABLE: dict[tuple[Phase, type[Event]], Rule] = {
    (Phase.IDLE, Begin): _launch,
    (Phase.RUNNING, RankFailed): _await_teardown,
    (Phase.RUNNING, JobFrozen): _kill_frozen,
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
    (Phase.STOPPING, StopAsked): _kill_leaving,
    (Phase.STOPPING, JobFrozen): _kill_leaving,
    (Phase.STOPPING, Tick): _kill_when_due,
    (Phase.STOPPING, JobExited): _exited_stopping,
    (Phase.LEAVING, StopAsked): _kill_leaving,
    (Phase.LEAVING, Tick): _kill_when_due,
    (Phase.LEAVING, JobExited): _stopped_now,
}
"""Every pair that means something."""
