"""The table of plans for nodes, and the way of a job off a node."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from holdfast.recover.policy import (
    CannotSave,
    End,
    JobExited,
    JobFrozen,
    Kill,
    Launch,
    NodeToLeave,
    Phase,
    RankFailed,
    RequestFinalSave,
    RestartLimits,
    State,
    StateSaved,
    StopRequested,
    Terminate,
    Tick,
    decide,
    move_grace_s,
)
from holdfast.recover.policy.nodes import Circumstances, Finding, Job, plan_for

LIMITS = RestartLimits()
LEAVE = NodeToLeave(node="n2", why="reboot is planned")
RUNNING = State(phase=Phase.RUNNING, has_stepped=True)


def after(*events, state=RUNNING):
    actions = ()
    for event in events:
        state, actions = decide(LIMITS, state, event, 1.0)
    return state, actions


@given(
    st.sampled_from(get_args(Finding)),
    st.sampled_from(get_args(Job)),
    st.builds(
        Circumstances,
        has_spare=st.booleans(),
        is_due=st.booleans(),
        is_only_one=st.booleans(),
        is_single=st.booleans(),
    ),
)
def test_a_healthy_job_is_touched_only_on_two_signals_or_a_notice_with_a_moment(
    finding, job, around
):
    plan = plan_for(finding, job, around)
    if job == "healthy" and finding in ("suspect", "faulty", "leaving", "cannot_launch"):
        assert plan in ("record", "exclude")
    if plan == "move":
        assert job == "healthy"
        assert around.has_spare or (finding == "leaving_at" and around.is_due)
    if around.is_single and not around.has_spare:
        assert plan != "exclude"  # there is no other node


def test_what_is_done_about_each_finding():
    spare, alone = Circumstances(has_spare=True), Circumstances(has_spare=False)
    assert plan_for("faulty", "healthy", spare) == "record"
    assert plan_for("faulty", "failed", spare) == "exclude"
    assert plan_for("faulty", "failed", alone) == "exclude"
    assert plan_for("confirmed", "healthy", spare) == "move"
    assert plan_for("confirmed", "healthy", alone) == "record"
    assert plan_for("suspect", "failed", alone) == "test"
    assert (
        plan_for("suspect", "failed", Circumstances(has_spare=True, is_only_one=False)) == "record"
    )
    assert plan_for("leaving", "healthy", spare) == "exclude"
    assert plan_for("leaving_at", "healthy", spare) == "move"
    assert plan_for("leaving_at", "healthy", alone) == "exclude"
    assert plan_for("leaving_at", "healthy", Circumstances(has_spare=False, is_due=True)) == "move"


def test_a_node_is_left_with_the_state_saved_and_a_new_launcher():
    state, actions = after(LEAVE)
    assert (state.phase, state.leaving, actions) == (Phase.STOPPING, "n2", (RequestFinalSave(),))
    state, actions = after(StateSaved(), JobExited(0), state=state)
    assert (state.phase, state.leaving, actions) == (Phase.RUNNING, "", (Launch(in_place=False),))
    state, actions = after(LEAVE, CannotSave(), JobExited(-15))
    assert (state.phase, actions) == (Phase.RUNNING, (Launch(in_place=False),))


def test_a_job_that_completes_meanwhile_is_completed_and_one_that_is_stopped_is_stopped():
    _, (end,) = after(LEAVE, JobExited(0))
    assert (end.state, end.exit_code) == ("completed", 0)
    state, actions = after(LEAVE, StopRequested("me"))
    assert (state.phase, actions) == (Phase.STOPPING, ())
    _, (end,) = after(StateSaved(), JobExited(0), state=state)
    assert isinstance(end, End)
    assert end.state == "stopped"
    _, actions = after(StopRequested("me"), state=state)
    assert actions == (Kill(),)


def test_a_failure_meanwhile_is_one_like_any_other():
    assert after(LEAVE, RankFailed())[0].phase is Phase.FAILING
    assert after(LEAVE, RankFailed())[1] == (Terminate(),)
    state, actions = after(LEAVE, JobFrozen())
    assert (state.phase, actions) == (Phase.FAILING, (Kill(),))
    state, actions = after(LEAVE)
    _, actions = decide(LIMITS, state, Tick(), 2.0 + move_grace_s(LIMITS, None))
    assert actions == (Kill(),)


def test_a_node_is_left_only_while_the_job_runs():
    for phase in set(Phase) - {Phase.RUNNING}:
        state = State(phase=phase, deadline_s=1e9)
        assert decide(LIMITS, state, LEAVE, 1.0) == (state, ())
