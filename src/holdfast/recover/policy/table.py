"""Decide the next actions by a table of rules."""

from collections.abc import Callable
from dataclasses import replace

from holdfast.recover.policy.events import (
    Action,
    Adopted,
    Begin,
    CannotSave,
    Diagnose,
    Diagnosed,
    End,
    Event,
    JobExited,
    JobFrozen,
    Kill,
    Launch,
    LossBroken,
    NodesBack,
    NodesMissing,
    NodeToLeave,
    OutageLasts,
    OutageOver,
    RankFailed,
    Replay,
    RequestFinalSave,
    Resolve,
    RollbackMissed,
    RollbackRequested,
    Saved,
    StateSaved,
    StopRequested,
    Terminate,
    Tick,
)
from holdfast.recover.policy.history import BROKEN_SLACK, after_failure, allowed_retries, place
from holdfast.recover.policy.state import (
    MAX_SAVE_S,
    Phase,
    RestartLimits,
    State,
    move_grace_s,
)

OUTAGE_STEP_S = 30.0
"""The seconds by which a failed probe puts off the restart. This is longer than the time between two
probes."""
WRAP = (
    "With `run.batches` around its loader, the job can leave out the batches that break the loss."
)
KEPT = (
    "It failed before its first step below a launcher that was kept, which may be the cause: "
    "a new launcher is started."
)
RESTORE = (
    "Have the job restore with `Checkpointer.restore`, which leaves out abandoned checkpoints."
)
REPLAYS = (
    "The same steps run again first, on other nodes or GPUs if there are several: if the loss breaks again with the "
    "same numbers, the data or the model is the cause."
)
MAX_REPLAYS = 4
"""The largest number of consecutive replays without a gain."""
MAX_DOUBLINGS = 30
"""A wait is doubled at most this often. The wait reaches its limit long before."""

Decision = tuple[State, tuple[Action, ...]]


def decide(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    """Return the next state and the actions for an event at `now_s` (monotonic seconds)."""
    rule = TABLE.get((state.phase, type(event)))
    return rule(limits, state, event, now_s) if rule is not None else (state, ())


def rule_of(state: State, event: object) -> str:
    """Return the name of the rule that `decide` applies to an event; empty if there is no rule."""
    rules = {
        (phase, kind): rule for (phase, kind), rule in TABLE.items() if isinstance(event, kind)
    }
    rule = next((rule for (phase, _), rule in rules.items() if phase is state.phase), None)
    return "" if rule is None else rule.__name__.strip("_").replace("_", "-")


def _launch(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    in_place = state.has_stepped
    running = replace(
        state,
        phase=Phase.RUNNING,
        deadline_s=None,
        launched_at_s=now_s,
        in_place=in_place,
        leaving="",
        grows=False,
        keeps_size=False,
    )
    return running, (Launch(in_place=in_place, moves_ranks=state.is_replay),)


def _adopt(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, Adopted)
    running = replace(state, phase=Phase.RUNNING, launched_at_s=now_s, in_place=event.in_place)
    if not event.moves:
        return running, ()
    # The votes of the ranks are lost. The ranks may still end with code 0, which is not the end of
    # the training.
    leaving = replace(running, phase=Phase.LEAVING, grows=True, save_s=event.save_s)
    # Ranks that have voted wait for a decision that never comes, so there is no point in waiting
    # for a first save.
    return replace(leaving, deadline_s=now_s + move_grace_s(limits, event.save_s or 0.0)), ()


def _learn_save(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, Saved)
    longest_s = max(event.save_s, state.save_s or 0.0)
    return replace(state, save_s=min(longest_s, MAX_SAVE_S)), ()


def _grow(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    if state.keeps_size:
        return state, ()
    deadline_s = now_s + move_grace_s(limits, state.save_s)
    saving = replace(state, phase=Phase.STOPPING, grows=True, deadline_s=deadline_s)
    return saving, (RequestFinalSave(),)


def _cannot_save(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.is_moving and not state.leaving:
        going_on = replace(state.staying(), phase=Phase.RUNNING, keeps_size=True)
        return replace(going_on, deadline_s=None), ()
    return _terminate(limits, state, event, now_s)


def _fail_stopping(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.is_moving:  # no stop was requested: treat it like any other failure
        return _await_teardown(limits, state.staying(), event, now_s)
    return _terminate(limits, state, event, now_s)


def _freeze_stopping(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.is_moving:
        return _kill_frozen(limits, state.staying(), event, now_s)
    return _kill_leaving(limits, state, event, now_s)


def _go_back(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, RollbackRequested)
    leaving = replace(state, phase=Phase.LEAVING, deadline_s=None, goes_back_to=event.to_step)
    return leaving, (Kill(),)


def _launch_earlier(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    """Return the decision after the end of the ranks of a job that goes back."""
    step = state.goes_back_to
    earlier = replace(
        state,
        goes_back_to=None,
        is_replay=False,
        has_stepped=True,
        best_step=step,
        best_checkpoint_step=step,
        rolled_back_to=step,
        missed_rollback=None,
    )
    return _launch(limits, earlier, event, now_s)


def _note_missed_rollback(
    _limits: RestartLimits, state: State, event: Event, _now_s: float
) -> Decision:
    assert isinstance(event, RollbackMissed)
    return replace(state, missed_rollback=event), ()


def _stop_again(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    if state.goes_back_to is not None:  # the ranks are already ending
        return replace(state, goes_back_to=None, stop_by=event.by), ()
    if state.is_moving:  # the ranks are already saving
        latest_s = now_s + limits.stop_grace_s
        deadline_s = None if state.deadline_s is None else min(state.deadline_s, latest_s)
        return replace(state.staying(), stop_by=event.by, deadline_s=deadline_s), ()
    return _kill_leaving(limits, state, event, now_s)


def _end_saving(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    """Return the decision if the job ended before all ranks had saved."""
    if state.is_moving:
        return _exited(limits, replace(state.staying(), phase=Phase.RUNNING), event, now_s)
    return _stopped_now(limits, state, event, now_s)


def _give_up(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, NodesMissing)
    if state.stop_by is not None:
        return finish(state, _stopped(state))
    if event.queued:
        return finish(state, End(state="queued", exit_code=4, outcome=event.outcome))
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
    can_go_back = event.can_go_back and state.missed_rollback is None
    if event.is_spike and (in_vain or not can_go_back):
        return state, ()  # the same data cause the same spike again: continue from the spike
    spike_step = event.step if event.is_spike else state.spike_step
    failing = replace(state, phase=Phase.FAILING, deadline_s=None, spike_step=spike_step)
    return failing, (Kill(),)


def _kill_when_due(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    if state.deadline_s is None or now_s < state.deadline_s:
        return state, ()
    phase = Phase.LEAVING if state.is_moving else state.phase
    return replace(state, phase=phase, deadline_s=None), (Kill(),)


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
    if event.work_done:
        why = f"{event.summary} It was not restarted."
        end = End(state="completed", exit_code=0, outcome=f"{event.summary} {event.mitigation}")
        return _resolved(state, end, why, rule="work-done")
    if state.in_place and not event.has_stepped:
        fresh, actions = _launch(limits, replace(state, has_stepped=False), event, now_s)
        why = f"{KEPT} {event.summary}"
        kept = Resolve(action="restart", explanation=why, rule="kept-launcher")
        return fresh, (kept, *actions)
    if not event.restart_helps:
        why = f"A restart does not mend this. {event.summary}"
        return _resolved(state, _failed(f"{why} {event.mitigation}"), why, rule="not-mended")
    if event.healthy_step is not None and state.missed_rollback is not None:
        return _rolled_back_in_vain(state, state.missed_rollback, event)
    replays = _replays(state, event)
    mends = event.is_hardware or event.is_checkpoint or replays
    skip = None if mends else state.skipping.next_skip(event.batches)
    failed = after_failure(limits, state, event, now_s, skip=skip, replays=replays)
    if (
        skip is None
        and not replays
        and failed.roots_since_gain.count(place(event)) > allowed_retries(limits, failed, event)
    ):
        at = f"at step {event.step}" if event.step else "before the first step"
        why = f"The same root came back {at} after a restart that gained nothing. {event.summary}"
        advice = "" if event.advises_only_restart else f" {event.mitigation}"
        if event.healthy_step is not None and event.batches is None:
            advice += f" {WRAP}"
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
    if replays:
        without = f" {REPLAYS}"
    because = f" {event.because}" if event.because else ""
    rule = "replay" if replays else "restart-after-wait" if wait_s else "restart"
    helps = f"A restart helps here{counted}{waited}.{because}{without}"
    resolve = Resolve(action="restart", explanation=helps, rule=rule)
    first: tuple[Action, ...] = (Replay(),) if replays else () if skip is None else (skip,)
    resolving = (*first, resolve)
    until_s = now_s + max(wait_s, limits.outage_max_s) if event.waits_for_outside else None
    waiting = replace(
        failed, phase=Phase.WAITING, deadline_s=now_s + wait_s, outage_until_s=until_s
    )
    if wait_s == 0.0:
        relaunched, actions = _launch(limits, waiting, event, now_s)
        return relaunched, (*resolving, *actions)
    return waiting, resolving


def _rolled_back_in_vain(state: State, missed: RollbackMissed, event: Diagnosed) -> Decision:
    why = f"{missed.sentence} The loss broke again. {event.summary}"
    end = _failed(f"{why} {RESTORE} Then `holdfast run --resume`.")
    return _resolved(state, end, why, rule="rollback-missed")


def _replays(state: State, event: Diagnosed) -> bool:
    """Return True if the same steps must run again, to find the class of a broken loss.

    Data that have broken a loss before need no replay. The number of consecutive replays without a
    gain is limited.
    """
    is_known = state.skipping.is_near(event.batches)
    return event.replays and not is_known and state.replays_in_vain < MAX_REPLAYS


def _launch_when_due(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    if state.deadline_s is not None and now_s < state.deadline_s:
        return state, ()
    return _launch(limits, state, event, now_s)


def _put_off(_limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    if state.outage_until_s is None or state.deadline_s is None:
        return state, ()
    put_off_s = min(now_s + OUTAGE_STEP_S, state.outage_until_s)
    return replace(state, deadline_s=max(state.deadline_s, put_off_s)), ()


def _launch_after_outage(
    limits: RestartLimits, state: State, event: Event, now_s: float
) -> Decision:
    if state.outage_until_s is None:
        return state, ()
    return _launch(limits, state, event, now_s)


def _save_first(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    stopping = replace(
        state, stop_by=event.by, phase=Phase.STOPPING, deadline_s=now_s + limits.stop_grace_s
    )
    return stopping, (RequestFinalSave(),)


def _leave_node(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, NodeToLeave)
    deadline_s = now_s + move_grace_s(limits, state.save_s)
    leaving = replace(state, leaving=event.node, phase=Phase.STOPPING, deadline_s=deadline_s)
    return leaving, (RequestFinalSave(),)


def _let_leave(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), ()


def _terminate(limits: RestartLimits, state: State, _event: Event, now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=now_s + limits.teardown_grace_s), (
        Terminate(),
    )


def _kill_leaving(_limits: RestartLimits, state: State, _event: Event, _now_s: float) -> Decision:
    return replace(state, phase=Phase.LEAVING, deadline_s=None), (Kill(),)


def _stop_failing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    again = state.stop_by is not None
    return replace(state, stop_by=event.by), (Kill(),) if again else ()


def _stop_diagnosing(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    if state.stop_by is not None:  # a second request: do not wait for the diagnosis
        return finish(state, _stopped(state))
    return replace(state, stop_by=event.by), ()


def _stop_waiting(_limits: RestartLimits, state: State, event: Event, _now_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    return finish(state, _stopped(replace(state, stop_by=event.by)))


def _stopped_now(limits: RestartLimits, state: State, event: Event, now_s: float) -> Decision:
    assert isinstance(event, JobExited)
    if state.goes_back_to is not None:
        return _launch_earlier(limits, state, event, now_s)
    if state.is_moving:  # other nodes need new launchers
        return _launch(limits, replace(state, has_stepped=False), event, now_s)
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
    """Return the state of an ended run, and the action that ends the run."""
    return replace(state, phase=Phase.ENDED, deadline_s=None), (how,)


Rule = Callable[[RestartLimits, State, Event, float], Decision]

TABLE: dict[tuple[Phase, type[Event]], Rule] = {
    (Phase.IDLE, Begin): _launch,
    (Phase.IDLE, Adopted): _adopt,
    (Phase.RUNNING, NodesMissing): _give_up,
    (Phase.STOPPING, NodesMissing): _give_up,
    (Phase.RUNNING, NodesBack): _grow,
    (Phase.RUNNING, RankFailed): _await_teardown,
    (Phase.RUNNING, JobFrozen): _kill_frozen,
    (Phase.RUNNING, Saved): _learn_save,
    (Phase.STOPPING, Saved): _learn_save,
    (Phase.RUNNING, LossBroken): _leave_broken_state,
    (Phase.RUNNING, NodeToLeave): _leave_node,
    (Phase.RUNNING, RollbackRequested): _go_back,
    (Phase.RUNNING, RollbackMissed): _note_missed_rollback,
    (Phase.STOPPING, RollbackMissed): _note_missed_rollback,
    (Phase.LEAVING, RollbackMissed): _note_missed_rollback,
    (Phase.FAILING, RollbackMissed): _note_missed_rollback,
    (Phase.RUNNING, JobExited): _exited,
    (Phase.RUNNING, StopRequested): _save_first,
    (Phase.FAILING, Tick): _kill_when_due,
    (Phase.FAILING, JobExited): _exited,
    (Phase.FAILING, StopRequested): _stop_failing,
    (Phase.DIAGNOSING, Diagnosed): _diagnosed,
    (Phase.DIAGNOSING, StopRequested): _stop_diagnosing,
    (Phase.WAITING, Tick): _launch_when_due,
    (Phase.WAITING, OutageLasts): _put_off,
    (Phase.WAITING, OutageOver): _launch_after_outage,
    (Phase.WAITING, StopRequested): _stop_waiting,
    (Phase.STOPPING, StateSaved): _let_leave,
    (Phase.STOPPING, CannotSave): _cannot_save,
    (Phase.STOPPING, RankFailed): _fail_stopping,
    (Phase.STOPPING, StopRequested): _stop_again,
    (Phase.STOPPING, JobFrozen): _freeze_stopping,
    (Phase.STOPPING, Tick): _kill_when_due,
    (Phase.STOPPING, JobExited): _end_saving,
    (Phase.LEAVING, StopRequested): _stop_again,
    (Phase.LEAVING, Tick): _kill_when_due,
    (Phase.LEAVING, JobExited): _stopped_now,
}
"""The rule for each pair of phase and event that has one."""
