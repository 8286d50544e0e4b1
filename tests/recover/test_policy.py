"""The pure policy: every claim of its docstring, and properties over random histories."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.recover import policy
from holdfast.recover.policy import (
    Begin,
    CannotSave,
    Diagnose,
    Diagnosed,
    End,
    JobExited,
    JobFrozen,
    Kill,
    Launch,
    LossBroken,
    NodeToLeave,
    Phase,
    RankFailed,
    Replay,
    RequestFinalSave,
    Resolve,
    RestartLimits,
    Saved,
    State,
    StateSaved,
    StopRequested,
    Terminate,
    Tick,
    decide,
)
from holdfast.recover.skipping.plan import Skip

STOP = StopRequested("x")
LIMITS = RestartLimits(max_restarts=3, window_s=100.0, backoff_first_s=2.0, backoff_max_s=7.0)


def diagnosed(
    root="a", step=10, *, checkpoint=None, has_stepped=True, helps=True, outside=False, **options
):
    return Diagnosed(
        fingerprint=root,
        step=step,
        checkpoint_step=checkpoint,
        has_stepped=has_stepped,
        summary=f"Root {root}.",
        mitigation="Mend it.",
        restart_helps=helps,
        waits_for_outside=outside,
        **options,
    )


def play(events, state=None, limits=LIMITS):
    """Feed (time, event) pairs; returns the last state and all actions."""
    state, done = state or State(), []
    for now_s, event in events:
        state, actions = decide(limits, state, event, now_s)
        done += actions
    return state, done


def crash(at_s, root="a", step=10, **options):
    return [(at_s, RankFailed()), (at_s, JobExited(1)), (at_s, diagnosed(root, step, **options))]


def test_a_job_that_ends_well_is_completed():
    state, actions = play([(0, Begin()), (5, JobExited(0))])
    assert state.phase is Phase.ENDED
    assert actions == [Launch(), End(state="completed", exit_code=0, outcome="The job completed.")]


def test_first_failure_after_progress_restarts_at_once():
    state, actions = play([(0, Begin()), *crash(5)])
    assert state.phase is Phase.RUNNING
    assert [type(action) for action in actions] == [Launch, Terminate, Diagnose, Resolve, Launch]


def test_when_a_rank_fails_the_others_are_asked_to_end_and_after_a_while_killed():
    state, actions = play(
        [(0, Begin()), (5, RankFailed()), (5 + LIMITS.teardown_grace_s - 0.1, Tick())]
    )
    assert actions == [Launch(), Terminate()]
    state, actions = play([(5 + LIMITS.teardown_grace_s, Tick()), (30, Tick())], state)
    assert actions == [Kill()], "killed once, when the grace is over"


def test_a_frozen_job_is_killed_at_once():
    state, actions = play([(0, Begin()), (5, JobFrozen())])
    assert (state.phase, actions) == (Phase.FAILING, [Launch(), Kill()])


def test_stops_at_once_on_what_a_restart_does_not_mend():
    _state, actions = play([(0, Begin()), *crash(5, helps=False)])
    end = actions[-1]
    assert isinstance(end, End)
    assert (end.state, end.exit_code) == ("failed", 1)
    assert "Root a." in end.outcome
    assert end.outcome.endswith("Mend it.")


def test_a_job_whose_work_is_done_is_not_restarted():
    _state, actions = play([(0, Begin()), *crash(5, helps=False, work_done=True)])
    end = actions[-1]
    assert isinstance(end, End)
    assert (end.state, end.exit_code, end.outcome) == ("completed", 0, "Root a. Mend it.")


@pytest.mark.parametrize("second_step", [9, 10, 11])
def test_never_loops_on_the_same_root_at_the_same_step(second_step):
    state, actions = play([(0, Begin()), *crash(5), *crash(10, step=second_step)])
    assert state.phase is Phase.ENDED
    assert "same root" in actions[-1].outcome


def run_through(failures, limits=LIMITS, state=None):
    """Fail at each (time, root, step, checkpoint), with time to wait; return the last state."""
    state, actions = state or State(phase=Phase.RUNNING), []
    for at_s, root, step, checkpoint in failures:
        state, _ = play([(at_s - 0.01, Tick())], state, limits)
        state, actions = play(crash(at_s, root, step, checkpoint=checkpoint), state, limits)
    return state, actions


def test_the_same_root_at_a_later_step_is_restarted():
    state, _ = run_through([(5, "a", 10, None), (10, "a", 20, None)])
    assert state.phase is Phase.RUNNING


def test_a_newer_checkpoint_is_progress_where_no_step_is_reported():
    newer = [(at_s, "a", None, at_s) for at_s in range(1, 60)]
    state, _ = run_through(newer)
    assert state.phase is Phase.RUNNING
    state, actions = run_through([(61, "a", None, 59)], state=state)
    assert state.phase is Phase.ENDED, "no newer one"
    assert "gained nothing" in actions[-1].outcome


def test_a_step_further_with_the_same_checkpoint_is_no_loop_and_one_back_is():
    state, _ = run_through([(5, "a", 100, 90), (10, "a", 102, 90)])
    assert state.phase is Phase.RUNNING
    assert run_through([(15, "a", 100, 90)], state=state)[0].phase is Phase.ENDED


def test_a_root_may_strike_once_in_the_loop_and_once_in_the_start_that_follows():
    """As two kills from outside do, one after the other."""
    state, _ = play(
        [
            (0, Begin()),
            *crash(5, step=13, checkpoint=10),
            *crash(6, step=10, checkpoint=10, has_stepped=False),  # a new launcher follows
            *crash(7, step=10, checkpoint=10, has_stepped=False),
        ]
    )
    assert state.phase is Phase.WAITING
    again = crash(20, step=10, checkpoint=10, has_stepped=False)
    state, actions = play([(15, Tick()), *again], state)
    assert state.phase is Phase.ENDED
    assert "same root" in actions[-1].outcome


def test_roots_that_take_turns_at_one_step_come_back():
    state, actions = run_through([(10, "a", 100, None), (20, "b", 100, None), (40, "a", 100, None)])
    assert state.phase is Phase.ENDED
    assert "The same root came back at step 100" in actions[-1].outcome


def test_a_job_of_which_nothing_is_known_gains_by_its_time():
    limits = RestartLimits()
    slow = [(at_s * limits.window_s, "a", None, None) for at_s in range(1, 30)]
    state, _ = run_through(slow, limits)
    assert (state.phase, state.vain_at_s) == (Phase.RUNNING, ())


def test_a_silent_job_that_fails_again_just_after_its_gain_waits():
    limits, state, now_s, waits = RestartLimits(), State(phase=Phase.RUNNING), 0.0, []
    for _ in range(40):
        now_s = state.launched_at_s + limits.blind_gain_s + 1
        state, _ = play(crash(now_s, step=None), state, limits)
        waits.append((state.deadline_s or now_s) - now_s)
        state, _ = play([(state.deadline_s or now_s, Tick())], state, limits)
    assert (state.phase, state.vain_at_s) == (Phase.RUNNING, ()), "and it goes on for ever"
    assert waits[:10] == [0, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert set(waits[10:]) == {300}


def test_two_kills_from_outside_within_one_checkpoint_interval_end_nothing():
    """With a checkpoint every 500 steps, the second kill comes before the lost work is redone."""
    limits, state = RestartLimits(), State(phase=Phase.RUNNING)
    state, _ = play(crash(600, step=1400, checkpoint=1000, killed_from_outside=True), state, limits)
    waits, now_s = [], 600.0
    for step in (1390, 1380, 1370, 1360):
        now_s += 600
        state, _ = play(
            crash(now_s, step=step, restored_step=1000, killed_from_outside=True), state, limits
        )
        waits.append((state.deadline_s or now_s) - now_s)
        state, _ = play([(now_s + 500, Tick())], state, limits)
        if state.phase is Phase.ENDED:
            break
    assert waits[:3] == [2, 4, 8]
    assert state.phase is Phase.ENDED, "but not for ever"


def test_after_a_rollback_gains_are_counted_from_the_step_that_was_restored():
    state, now_s = State(phase=Phase.RUNNING), 0.0
    for step, restored in ((10_000, None), (6_000, 5_000), (7_000, 6_000), (8_000, 7_000)):
        now_s += 1000
        state, actions = play(
            crash(now_s, step=step, checkpoint=step, restored_step=restored), state
        )
        assert (state.phase, actions[-1]) == (Phase.RUNNING, Launch(in_place=True)), step
    assert (state.best_step, state.best_checkpoint_step) == (8_000, 8_000)


def test_a_rollback_to_a_job_without_steps():
    state = State(phase=Phase.RUNNING)
    for at_s, saved, restored in ((1000, 10_000, None), (2000, 6_000, 5_000), (3000, 7_000, 6_000)):
        state, actions = play(
            crash(at_s, step=None, checkpoint=saved, restored_step=restored), state
        )
        assert (state.phase, actions[-1]) == (Phase.RUNNING, Launch(in_place=True)), saved


def test_what_fails_at_the_same_step_again_after_a_rollback_gained_nothing():
    state, _ = play(crash(10, step=10_000, checkpoint=10_000), State(phase=Phase.RUNNING))
    state, actions = play(crash(500, step=10_000, checkpoint=10_000, restored_step=5_000), state)
    assert state.phase is Phase.ENDED
    assert "The same root came back at step 10000" in actions[-1].outcome


def test_steps_that_are_lost_again_and_again_are_no_gain():
    """Each attempt saves at step 6,000; the next finds that damaged and begins from 5,000."""
    state, now_s = State(phase=Phase.RUNNING), 0.0
    for step in (9_000, 6_010, 6_040, 6_020):
        now_s += 1000
        state, _ = play(crash(now_s, step=step, checkpoint=6_000, restored_step=5_000), state)
    assert state.phase is Phase.ENDED


def test_a_job_of_which_nothing_is_known_may_fail_a_few_times_in_no_time():
    limits = replace(LIMITS, max_restarts=99)
    quick = [(20 * number, "a", None, None) for number in range(1, limits.blind_retries + 1)]
    state, _ = run_through(quick, limits)
    assert state.phase is Phase.WAITING
    assert run_through([(500, "a", None, None)], limits, state)[0].phase is Phase.ENDED


def test_a_job_that_reports_steps_and_makes_none_is_not_taken_for_one_of_which_nothing_is_known():
    state, actions = run_through([(5, "a", 0, None), (LIMITS.blind_gain_s + 50, "a", 0, None)])
    assert state.phase is Phase.ENDED
    assert "before the first step" in actions[-1].outcome


def test_what_ends_a_run_does_not_advise_a_restart():
    """Leave out advice that is only to restart: the run has ended."""
    failing = [(0, Begin()), *crash(5), *crash(10)]
    end = play(failing)[1][-1]
    assert "Mend it." not in end.outcome
    assert end.outcome.endswith("Mend the cause, then `holdfast run --resume`.")


def test_other_advice_is_given_again_where_a_root_that_came_back_ends_the_run():
    end = play([(0, Begin()), *crash(5), *crash(10, advises_only_restart=False)])[1][-1]
    assert end.outcome.endswith("Root a. Mend it. Mend the cause, then `holdfast run --resume`.")


def test_another_root_at_the_same_step_is_restarted_after_a_wait():
    state, actions = play([(0, Begin()), *crash(5, "a"), *crash(10, "b")])
    assert state.phase is Phase.WAITING
    assert state.deadline_s == 10 + LIMITS.backoff_first_s
    state, actions = play([(11.9, Tick())], state)
    assert actions == []
    state, actions = play([(12.0, Tick())], state)
    assert (state.phase, actions) == (Phase.RUNNING, [Launch(in_place=True)])


def test_what_failed_before_its_first_step_gets_a_new_launcher():
    """A kept launcher may be the cause, so not even an error of the script ends the run."""
    early = crash(8, has_stepped=False, helps=False)
    state, actions = play([(0, Begin()), *crash(5), *early])
    launches = [action for action in actions if isinstance(action, Launch)]
    assert launches == [Launch(), Launch(in_place=True), Launch()]
    assert actions[-2].explanation.startswith("It failed before its first step below a launcher")
    state, actions = play(crash(9, has_stepped=False, helps=False), state)
    assert isinstance(actions[-1], End), "but once"


def broken(at_s, step, *, healthy=None, spike=False):
    event = LossBroken(step=step, is_spike=spike, can_go_back=healthy is not None)
    cause = diagnosed("loss", step, helps=healthy is not None, healthy_step=healthy)
    return [(at_s, event), (at_s, JobExited(-9)), (at_s, cause)]


def test_a_broken_loss_ends_the_attempt_at_once_and_then_the_run_where_nothing_newer_is_healthy():
    state, actions = play([(0, Begin()), *broken(5, 171, healthy=100)])
    assert actions[1:3] == [Kill(), Diagnose()]
    assert state.phase is Phase.RUNNING
    assert play(broken(9, 175, healthy=100), state)[0].phase is Phase.ENDED
    assert play(broken(9, 173, healthy=150), state)[0].phase is Phase.ENDED, "the same step"
    assert play(broken(9, 400, healthy=350), state)[0].phase is Phase.RUNNING


def test_a_loss_that_is_not_finite_ends_the_run_where_nothing_is_healthy():
    state, actions = play([(0, Begin()), *broken(5, 171)])
    assert (state.phase, actions[-1].state) == (Phase.ENDED, "failed")


def test_a_spike_is_left_once_and_lived_with_where_it_comes_again_or_nothing_is_healthy():
    state, _ = play([(0, Begin()), *broken(5, 171, healthy=100, spike=True)])
    assert state.phase is Phase.RUNNING
    for step in (171, 173):
        again = LossBroken(step=step, is_spike=True)
        assert decide(LIMITS, state, again, 9.0) == (state, ())
    later = LossBroken(step=500, is_spike=True)
    assert decide(LIMITS, state, later, 9.0)[1] == (Kill(),)
    unsafe = LossBroken(step=500, is_spike=True, can_go_back=False)
    assert decide(LIMITS, state, unsafe, 9.0) == (state, ())


def broken_by(at_s, step, batches, *, healthy=100, spike=False):
    event = LossBroken(step=step, is_spike=spike, batches=batches)
    cause = diagnosed("loss", step, healthy_step=healthy, batches=batches)
    return [(at_s, event), (at_s, JobExited(-9)), (at_s, cause)]


def skips(actions):
    return [(one.first, one.last) for one in actions if isinstance(one, Skip)]


def test_a_broken_loss_has_its_batches_left_out_before_the_next_launch():
    state, actions = play([(0, Begin()), *broken_by(5, 171, (170, 172))])
    assert actions[1:3] == [Kill(), Diagnose()]
    skip, resolve, launch = actions[3:]
    assert (skip, launch) == (Skip(first=170, last=172), Launch(in_place=True))
    assert "From now on batches 170 to 172 of the data are left out." in resolve.explanation
    assert state.skipping.left_out.ranges == ((170, 172),)


@pytest.mark.parametrize("spike", [True, False])
def test_more_is_left_out_at_the_same_place_and_then_the_rules_without_batches_hold(spike):
    state, actions = play([(0, Begin())])
    for at_s in range(1, 5):
        state, more = play(broken_by(at_s, 171, (170, 172 + at_s), spike=spike), state)
        actions += more
        assert state.phase is Phase.RUNNING, "no restart is counted as one in vain"
    assert skips(actions) == [(170, 173), (170, 177), (166, 181), (158, 189)]
    again = broken_by(9, 171, (170, 204), spike=spike)
    if spike:
        assert decide(LIMITS, state, again[0][1], 9.0) == (state, ()), "it is lived with"
    else:
        state, actions = play(again, state)
        assert (state.phase, skips(actions)) == (Phase.ENDED, [])


def replayed(at_s, step, batches, **found):
    *begin, cause = broken_by(at_s, step, batches)
    return [*begin, (at_s, replace(cause[1], **found))]


def test_the_steps_run_again_before_batches_are_left_out():
    state, actions = play([(0, Begin()), *replayed(5, 171, (170, 172), replays=True)])
    replay, resolve, launch = actions[3:]
    assert (replay, launch) == (Replay(), Launch(in_place=True, moves_ranks=True))
    assert (resolve.rule, "The same steps run again first" in resolve.explanation) == (
        "replay",
        True,
    )
    state, actions = play(replayed(9, 171, (170, 172), because="It came again."), state)
    assert skips(actions) == [(170, 172)]
    assert "It came again. From now on batches 170 to 172" in actions[-2].explanation
    assert actions[-1] == Launch(in_place=True)
    state, actions = play(replayed(12, 172, (170, 173), replays=True), state)
    assert skips(actions) == [(170, 175)], "these data have broken a loss before"


@pytest.mark.parametrize("kind", ["is_hardware", "is_checkpoint"])
def test_nothing_is_left_out_where_the_data_are_not_why(kind):
    events = replayed(9, 171, (170, 172), **{kind: True})
    state, actions = play([(0, Begin()), *replayed(5, 171, (170, 172), replays=True), *events])
    assert (state.phase, skips(actions)) == (Phase.WAITING, [])


def test_replays_in_a_row_without_a_gain_are_limited():
    """Each time the loss breaks at another place: batches are left out then, or the run ends."""
    for batches in ((170, 172), None):
        state, actions = play([(0, Begin())])
        for number in range(6):
            step = 171 + 10 * number
            led = batches and (batches[0] + 10 * number, batches[1] + 10 * number)
            state, more = play(replayed(number, step, led, replays=True), state)
            actions += more
        assert sum(isinstance(one, Replay) for one in actions) == 4
        assert bool(skips(actions)) == bool(batches)
        assert (state.phase is Phase.ENDED) == (batches is None)


def test_batches_elsewhere_are_left_out_though_nothing_newer_is_healthy():
    state, _ = play([(0, Begin()), *broken_by(5, 171, (170, 172))])
    state, actions = play(broken_by(9, 190, (192, 195)), state)
    assert (state.phase, skips(actions)) == (Phase.RUNNING, [(192, 195)])
    assert state.skipping.in_vain == 2
    state, _ = play(broken_by(20, 400, (500, 503), healthy=350), state)
    assert state.skipping.in_vain == 1, "a newer healthy checkpoint is a gain"


def test_what_is_left_out_stays_so_after_other_failures():
    state, _ = play([(0, Begin()), *broken_by(5, 171, (170, 172)), *crash(9, step=180)])
    assert state.skipping.left_out.ranges == ((170, 172),)


def test_nothing_is_left_out_where_the_run_stops():
    state, _ = play([(0, Begin()), (5, LossBroken(step=171, is_spike=False, batches=(170, 172)))])
    events = [(5, StopRequested("Ctrl-C")), (5, JobExited(-9)), broken_by(5, 171, (170, 172))[-1]]
    state, actions = play(events, state)
    assert (state.phase, skips(actions)) == (Phase.ENDED, [])
    state, actions = play([(0, Begin()), *broken(5, 171)])
    assert skips(actions) == [], "nothing is healthy"


def test_a_stop_that_comes_while_a_launcher_is_kept_is_a_stop():
    events = [(8, RankFailed()), (8, StopRequested("Ctrl-C")), (8, JobExited(1))]
    state, actions = play([(0, Begin()), *crash(5), *events, (9, diagnosed(has_stepped=False))])
    assert (state.phase, actions[-1].state) == (Phase.ENDED, "stopped")


def test_waits_double_without_progress_up_to_a_bound_and_start_over_with_it():
    limits = replace(LIMITS, max_restarts=100)
    state, waits, now_s = State(phase=Phase.RUNNING), [], 0.0
    for index, step in enumerate([10, 10, 10, 10, 10, 30, 30]):
        state, _ = play(crash(now_s, root=str(index), step=step), state, limits)
        waits.append((state.deadline_s or now_s) - now_s)
        now_s += 20
        state, _ = play([(now_s, Tick())], state, limits)
    assert waits == [0, 2, 4, 7, 7, 0, 2]


def test_a_cause_outside_the_job_is_waited_for():
    state, _ = play([(0, Begin()), *crash(5, outside=True)])
    assert state.deadline_s == 5 + LIMITS.outside_wait_s


def test_the_budget_counts_restarts_without_a_gain():
    state, _ = run_through(
        [(10 * number, str(number), 10, None) for number in range(1, LIMITS.max_restarts + 1)]
    )
    assert state.phase is Phase.WAITING
    spent, actions = run_through([(50, "x", 10, None)], state=state)
    assert spent.phase is Phase.ENDED
    assert actions[-1].exit_code == 3
    gained, _ = run_through([(50, "x", 500, None)], state=state)
    assert (gained.phase, gained.vain_at_s) == (Phase.RUNNING, ()), "a gain gives the budget back"
    later, _ = run_through([(LIMITS.window_s + 40, "x", 10, None)], state=state)
    assert later.phase is Phase.WAITING, "what is older than the window no longer counts"


def test_no_restart_is_allowed_where_none_is():
    _, actions = run_through([(5, "a", 10, None)], replace(LIMITS, max_restarts=0))
    assert actions[-1].exit_code == 3


def test_a_storm_that_gains_goes_on_for_ever():
    """A fault a minute, of one root, each after 500 steps."""
    state, _ = run_through([(60 * number, "a", 500 * number, None) for number in range(1, 500)])
    assert state.phase is Phase.RUNNING


def test_stop_saves_first():
    _state, actions = play(
        [(0, Begin()), (5, StopRequested("Ctrl-C")), (6, StateSaved()), (7, JobExited(0))]
    )
    assert actions == [
        Launch(),
        RequestFinalSave(),
        End(state="stopped", exit_code=4, outcome="Stopped by Ctrl-C."),
    ]


def test_ranks_that_saved_and_do_not_leave_are_killed():
    too_late_s = 6 + LIMITS.teardown_grace_s
    _, actions = play([(0, Begin()), (5, STOP), (6, StateSaved()), (too_late_s, Tick())])
    assert actions[-1] == Kill()


@pytest.mark.parametrize("event", [StopRequested("again"), JobFrozen()])
def test_stop_does_not_wait_for_what_cannot_come(event):
    state, actions = play([(0, Begin()), (5, STOP), (6, event)])
    assert (state.phase, actions[-1]) == (Phase.LEAVING, Kill())


def test_ranks_that_cannot_save_are_asked_to_end_and_then_killed():
    state, actions = play([(0, Begin()), (5, STOP), (6, CannotSave())])
    assert (state.phase, actions[-1]) == (Phase.LEAVING, Terminate())
    _, actions = play([(6 + LIMITS.teardown_grace_s, Tick())], state)
    assert actions == [Kill()]


def test_ranks_do_not_wait_for_one_that_failed_to_stop():
    state, actions = play([(0, Begin()), (5, STOP), (6, RankFailed())])
    assert (state.phase, actions[-1]) == (Phase.LEAVING, Terminate())


@pytest.mark.parametrize("returncode", [0, 1])
def test_a_job_that_ends_by_itself_while_asked_to_stop_is_stopped(returncode):
    """Its handler may have saved and left; a job that was done ends at once when resumed."""
    _, actions = play([(0, Begin()), (5, STOP), (6, JobExited(returncode))])
    assert (actions[-1].state, actions[-1].exit_code) == ("stopped", 4)


def test_asked_twice_nothing_is_waited_for():
    failing, actions = play([(0, Begin()), (5, RankFailed()), (5, STOP), (5, STOP)])
    assert actions[-1] == Kill()
    state, actions = play([(6, JobExited(1)), (6, STOP)], failing)
    assert (state.phase, actions[-1].state) == (Phase.ENDED, "stopped")


def test_what_lies_outside_may_strike_again_a_few_times_after_longer_and_longer_waits():
    limits = replace(LIMITS, outside_wait_s=30, outside_retries=4, backoff_max_s=100)
    state, now_s, waits = State(phase=Phase.RUNNING), 0.0, []
    while state.phase is not Phase.ENDED:
        state, actions = play(crash(now_s, outside=True), state, replace(limits, max_restarts=99))
        if state.deadline_s is not None:
            waits.append(state.deadline_s - now_s)
        now_s += 200
        state, _ = play([(now_s, Tick())], state, limits)
    assert waits == [30, 60, 100, 100]
    assert "same root" in actions[-1].outcome


def test_stop_is_bounded():
    _, actions = play([(0, Begin()), (5, STOP), (5 + LIMITS.stop_grace_s, Tick())])
    assert actions[-1] == Kill()


def test_stop_during_a_failure_is_not_followed_by_a_restart():
    state, actions = play(
        [(0, Begin()), (5, RankFailed()), (5, STOP), (6, JobExited(1)), (7, diagnosed())]
    )
    assert (state.phase, actions[-1].state) == (Phase.ENDED, "stopped")


def test_stop_while_waiting_ends_the_run():
    state, actions = play([(0, Begin()), *crash(5, "a"), *crash(10, "b"), (10.5, STOP)])
    assert (state.phase, actions[-1].state) == (Phase.ENDED, "stopped")


EVENTS = st.one_of(
    st.builds(Begin),
    st.builds(RankFailed),
    st.builds(JobFrozen),
    st.builds(JobExited, st.integers(-9, 2)),
    st.builds(
        diagnosed,
        st.sampled_from("abc"),
        st.integers(0, 30),
        helps=st.booleans(),
        outside=st.booleans(),
    ),
    st.builds(StopRequested, st.just("x")),
    st.builds(StateSaved),
    st.builds(CannotSave),
    st.builds(Saved, st.floats(0, 1e6)),
    st.builds(NodeToLeave, node=st.just("n"), why=st.just("w")),
    st.sampled_from([policy.OutageLasts(), policy.OutageOver()]),
    st.builds(Tick),
)


@given(st.lists(st.tuples(st.floats(0, 50), EVENTS), max_size=60))
def test_whatever_happens(history):
    """Never two jobs at once, nothing after the end, the budget is kept, and a dead run stays dead."""
    state, now_s, running, ended = State(), 0.0, False, False
    for wait_s, event in history:
        now_s += wait_s
        if isinstance(event, JobExited):
            if not running:
                continue
            running = False
        if isinstance(event, Diagnosed) and state.phase is not Phase.DIAGNOSING:
            continue
        state, actions = decide(LIMITS, state, event, now_s)
        assert not (ended and actions)
        for action in actions:
            if isinstance(action, Launch):
                assert not running, "two jobs at once"
                running = True
                in_vain = [at_s for at_s in state.vain_at_s if now_s - at_s < LIMITS.window_s]
                assert len(in_vain) < LIMITS.max_restarts
            ended = ended or isinstance(action, End)
    assert ended == (state.phase is Phase.ENDED)


def test_every_phase_but_the_end_can_be_left():
    for phase in Phase:
        ways = [pair for pair in policy.TABLE if pair[0] is phase]
        assert bool(ways) == (phase is not Phase.ENDED)
