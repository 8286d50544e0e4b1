"""Moves of a job to other nodes: to more nodes than before, or away from one node."""

import itertools

import pytest

from holdfast.recover.policy import (
    Adopted,
    Begin,
    CannotSave,
    Diagnosed,
    JobExited,
    JobFrozen,
    Kill,
    Launch,
    NodesBack,
    NodeToLeave,
    Phase,
    RankFailed,
    RequestFinalSave,
    RestartLimits,
    Saved,
    State,
    StateSaved,
    StopRequested,
    Tick,
    decide,
    move_grace_s,
)

LIMITS = RestartLimits()
FAILURE = Diagnosed(
    fingerprint="a",
    step=10,
    has_stepped=True,
    summary="Root a.",
    mitigation="Mend it.",
    restart_helps=True,
)


def play(events, state=None):
    """Feed (time, event) pairs; return the last state and all actions."""
    state, done = state or State(), []
    for now_s, event in events:
        state, actions = decide(LIMITS, state, event, now_s)
        done += actions
    return state, done


GROWING = [(0, Begin()), (1, NodesBack())]


def test_a_job_that_can_grow_saves_and_is_launched_anew():
    state, actions = play(GROWING)
    assert (state.phase, actions[1:]) == (Phase.STOPPING, [RequestFinalSave()])
    state, actions = play([(2, StateSaved()), (3, JobExited(0))], state)
    assert (state.phase, state.grows, actions) == (Phase.RUNNING, False, [Launch()])


def test_a_job_that_cannot_save_keeps_its_size_until_it_ends():
    state, actions = play([*GROWING, (2, CannotSave()), (3, NodesBack())])
    assert (state.phase, actions[2:]) == (Phase.RUNNING, [])
    crash = [(4, RankFailed()), (4, JobExited(1)), (4, FAILURE)]
    state, _ = play([*crash, (5, NodesBack())], state)
    assert state.grows


def test_a_save_that_takes_too_long_is_ended_and_the_job_goes_on():
    grace_s = move_grace_s(LIMITS, None)
    state, actions = play([*GROWING, (1 + grace_s, Tick()), (2 + grace_s, JobExited(-9))])
    assert actions[2:] == [Kill(), Launch()]
    assert state.phase is Phase.RUNNING


@pytest.mark.parametrize("move", [NodesBack(), NodeToLeave(node="n2", why="a notice")])
def test_a_move_waits_for_saves_that_take_longer_than_a_stop_may(move):
    long_s = 10 * LIMITS.stop_grace_s
    saves = [(1, Saved(long_s)), (2, Saved(1.0))]
    state, actions = play([(0, Begin()), *saves, (3, move), (3 + long_s, Tick())])
    assert (state.phase, actions[1:]) == (Phase.STOPPING, [RequestFinalSave()])
    _, actions = play([(3 + move_grace_s(LIMITS, long_s), Tick())], state)
    assert actions == [Kill()]
    stopping, _ = play([(5, StopRequested("me"))], state)
    _, actions = play([(5 + LIMITS.stop_grace_s, Tick())], stopping)
    assert actions == [Kill()], "a stop is waited for as long as any other"


def test_the_next_supervisor_waits_for_a_long_save_of_a_move_too():
    state, _ = play([(0, Adopted(in_place=False, moves=True, save_s=500.0))])
    state, actions = play([(LIMITS.stop_grace_s + 500.0, Tick())], state)
    assert actions == []
    _, actions = play([(move_grace_s(LIMITS, 500.0), Tick())], state)
    assert actions == [Kill()]


@pytest.mark.parametrize("event", [RankFailed(), JobFrozen(), JobExited(1)])
def test_a_failure_while_the_ranks_save_is_diagnosed(event):
    state, _ = play([*GROWING, (2, event)])
    if state.phase is Phase.FAILING:
        state, _ = play([(3, JobExited(-9))], state)
    assert (state.phase, state.grows) == (Phase.DIAGNOSING, False)


def test_a_job_that_ends_or_is_to_stop_while_it_saves_is_not_launched_anew():
    _, actions = play([*GROWING, (2, JobExited(0))])
    assert actions[-1].state == "completed"
    for saved in ([], [(3, StateSaved())]):
        _, actions = play([*GROWING, *saved, (4, StopRequested("me")), (5, JobExited(0))])
        assert actions[-1].state == "stopped"


def test_the_next_supervisor_goes_on_with_a_job_that_was_to_grow():
    """Its ranks may have left with code 0, which is not the end of the training."""
    state, _ = play([(0, Adopted(in_place=False, moves=True))])
    for events in (
        [(1, JobExited(0))],
        [(1, JobExited(-9))],
        [(1, StateSaved()), (2, JobExited(0))],
    ):
        ended, actions = play(events, state)
        assert (ended.phase, actions) == (Phase.RUNNING, [Launch()])
    _, actions = play([(1, StopRequested("me")), (2, JobExited(0))], state)
    assert actions[-1].state == "stopped"
    _, actions = play([(LIMITS.stop_grace_s, Tick())], state)
    assert actions == [Kill()]


def test_no_order_of_events_during_a_move_loses_a_stop_a_failure_or_the_run():
    """Both moves, all orders of up to four events: each state has a deadline and a reason."""
    leave = NodeToLeave(node="n2", why="a notice")
    kinds = (StateSaved(), CannotSave(), RankFailed(), JobFrozen(), StopRequested("me"), Tick())
    for move, length in itertools.product((leave, NodesBack()), range(5)):
        for between in itertools.product(kinds, repeat=length):
            begun, _ = play([(0, Begin()), (1, move)])
            state, actions = play(
                [(1000.0 * (2 + at), one) for at, one in enumerate(between)], begun
            )
            assert state.phase is not Phase.ENDED
            was_killed = Kill() in actions
            assert state.deadline_s is not None or was_killed or state.phase is Phase.RUNNING
            moving = [not isinstance(one, StopRequested) for one in between]
            assert (state.stop_by is None) == all(moving)
            if state.phase is Phase.RUNNING:
                assert state.keeps_size
                continue
            after, actions = play([(9000.0, JobExited(-9))], state)
            if state.phase is Phase.FAILING:
                assert (after.phase, after.is_moving) == (Phase.DIAGNOSING, False)
            elif state.stop_by is not None:
                assert actions[-1].state == "stopped"
            else:
                assert after.phase in (Phase.RUNNING, Phase.DIAGNOSING)
