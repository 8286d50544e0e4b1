"""The modes are a pure function over the policy: what each carries out, holds or only records."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.recover import policy
from holdfast.recover.people import modes
from holdfast.recover.people.modes import Approved, Held, Note, Propose, WentOn, Withdraw
from holdfast.recover.policy import Phase

LIMITS = policy.RestartLimits()
RUNNING = policy.State(phase=Phase.RUNNING)
HANG = policy.JobFrozen()
NAN = policy.LossBroken(step=7, is_spike=False)
LEFT = policy.RankFailed(others_run=True)
FAILURE = policy.Diagnosed(
    fingerprint="a",
    step=10,
    has_stepped=True,
    summary="Root a.",
    mitigation="Mend it.",
    restart_helps=True,
)


def decide(mode, event, state=RUNNING, held=None, now_s=5.0):
    return modes.decide(mode, LIMITS, state, held, event, now_s)


@pytest.mark.parametrize(
    ("finding", "action"),
    [(HANG, policy.Kill()), (NAN, policy.Kill()), (LEFT, policy.Terminate())],
)
def test_act_ends_a_running_job_and_the_others_leave_it_alone(finding, action):
    acted = decide("act", finding)
    assert (acted.state.phase, acted.held, acted.actions) == (Phase.FAILING, None, (action,))
    proposed = decide("propose", finding)
    assert (proposed.state, proposed.actions) == (RUNNING, (Propose(finding),))
    noted = decide("observe", finding)
    assert (noted.state, noted.actions) == (RUNNING, (Note(finding),))
    assert proposed.held == noted.held == Held(finding=finding)


@pytest.mark.parametrize("finding", [HANG, NAN, LEFT])
def test_an_approved_proposal_is_carried_out_as_act_would_have(finding):
    held = decide("propose", finding).held
    approved = decide("propose", Approved(), held=held)
    acted = decide("act", finding)
    assert (approved.state, approved.held, approved.actions) == (acted.state, None, acted.actions)


def test_a_supervisor_that_takes_over_keeps_the_proposal_until_it_has_the_job():
    taking_over = policy.State()
    assert taking_over.phase is not Phase.RUNNING
    held = Held(finding=NAN)
    for event in (policy.Saved(0.5), policy.Tick()):
        assert decide("propose", event, taking_over, held).held == held


def test_nothing_is_approved_that_was_not_proposed():
    for mode, held in (("propose", None), ("observe", Held(finding=HANG)), ("act", None)):
        assert decide(mode, Approved(), held=held).actions == ()
    failing = dataclasses.replace(RUNNING, phase=Phase.FAILING)
    assert decide("propose", Approved(), failing, Held(finding=HANG)).actions == ()


@pytest.mark.parametrize("mode", ["propose", "observe"])
def test_the_same_finding_is_held_once_and_another_one_anew(mode):
    held = Held(finding=NAN)
    again = policy.LossBroken(step=NAN.step + modes.APART_STEPS, is_spike=False)
    same = decide(mode, again, held=held)
    assert (same.actions, same.held) == ((), Held(finding=again))
    assert decide(mode, HANG, held=Held(finding=HANG)).actions == ()
    later = policy.LossBroken(step=NAN.step + modes.APART_STEPS + 1, is_spike=False)
    assert len(decide(mode, later, held=held).actions) == 1
    assert decide(mode, dataclasses.replace(later, since=NAN.step), held=held).actions == ()
    assert len(decide(mode, HANG, held=held).actions) == 1


@pytest.mark.parametrize("mode", ["propose", "observe"])
def test_a_rank_that_left_is_held_where_nothing_else_is(mode):
    held = decide(mode, LEFT).held
    assert decide(mode, LEFT, held=held) == modes.Verdict(RUNNING, held, ())
    for other in (Held(finding=HANG), Held(finding=NAN)):
        assert decide(mode, LEFT, held=other) == modes.Verdict(RUNNING, other, ())
    assert decide(mode, NAN, held=held).held == Held(finding=NAN)
    assert len(decide(mode, HANG, held=held).actions) == 1
    crashed = decide(mode, policy.RankFailed(), held=held)
    assert [type(one) for one in crashed.actions] == [Withdraw, policy.Terminate]


def test_a_job_that_goes_on_or_ends_withdraws_the_proposal():
    hang, nan = Held(finding=HANG), Held(finding=NAN)
    assert decide("propose", WentOn(), held=hang).held is None
    assert isinstance(decide("propose", WentOn(), held=hang).actions[0], Withdraw)
    assert decide("propose", WentOn(), held=nan).held == nan
    crashed = decide("propose", policy.RankFailed(), held=nan)
    assert crashed.held is None
    assert [type(one) for one in crashed.actions] == [Withdraw, policy.Terminate]


def test_a_spike_that_the_policy_itself_lives_with_is_not_held():
    lived_with = policy.LossBroken(step=7, is_spike=True, can_go_back=False)
    for mode in modes.MODES:
        assert decide(mode, lived_with) == modes.Verdict(RUNNING, None, ())


def test_a_failed_job_is_started_again_unless_the_run_is_only_observed():
    diagnosing = dataclasses.replace(RUNNING, phase=Phase.DIAGNOSING)
    acted, proposed = (decide(mode, FAILURE, diagnosing) for mode in ("act", "propose"))
    assert acted == proposed
    assert acted.state.phase is Phase.RUNNING
    observed = decide("observe", FAILURE, diagnosing)
    assert observed.state.phase is Phase.ENDED
    resolve, end = observed.actions
    assert (resolve.action, resolve.rule) == ("stop", "observe")
    assert (end.state, end.exit_code) == ("failed", 1)
    assert "A restart helps here." in end.outcome
    unmended = dataclasses.replace(FAILURE, restart_helps=False)
    assert decide("observe", unmended, diagnosing) == decide("act", unmended, diagnosing)


EVENTS = st.sampled_from(
    [
        HANG,
        NAN,
        FAILURE,
        Approved(),
        WentOn(),
        policy.Begin(),
        policy.RankFailed(),
        LEFT,
        policy.JobExited(0),
        policy.JobExited(1),
        policy.Tick(),
        policy.StopRequested("me"),
        policy.StateSaved(),
        policy.LossBroken(step=99, is_spike=True),
    ]
)


@given(st.lists(EVENTS, max_size=30), st.sampled_from(["propose", "observe"]))
def test_a_running_job_is_never_touched_without_an_approval(events, mode):
    state, held = policy.State(), None
    for now_s, event in enumerate(events):
        verdict = modes.decide(mode, LIMITS, state, held, event, float(now_s))
        kills = any(isinstance(one, policy.Kill | policy.Terminate) for one in verdict.actions)
        if state.phase is Phase.RUNNING and kills:
            failed = event == policy.RankFailed()
            approved = isinstance(event, Approved) and mode == "propose" and held is not None
            assert failed or approved
        if mode == "observe" and state.phase is not Phase.IDLE:
            assert not any(isinstance(one, policy.Launch) for one in verdict.actions)
        if verdict.held is not None:
            assert verdict.state.phase is Phase.RUNNING
        state, held = verdict.state, verdict.held
        if state.phase is Phase.ENDED:
            break


@given(st.lists(EVENTS.filter(lambda event: not isinstance(event, Approved | WentOn)), max_size=30))
def test_act_is_the_policy_itself(events):
    state, held = policy.State(), None
    for now_s, event in enumerate(events):
        verdict = modes.decide("act", LIMITS, state, held, event, float(now_s))
        state_of_policy, actions = policy.decide(LIMITS, state, event, float(now_s))
        assert (verdict.state, verdict.actions, verdict.held) == (state_of_policy, actions, None)
        state = verdict.state


def test_a_node_to_leave_takes_no_other_proposal_away():
    leave = policy.NodeToLeave(node="n2", why="a notice")
    for finding in (HANG, NAN):
        held = decide("propose", finding).held
        after = decide("propose", leave, held=held)
        assert (after.held, after.actions, after.state) == (held, (), RUNNING)
    assert decide("propose", leave).actions == (Propose(leave),)
