"""Choose by the mode which decisions are carried out: a pure function over the policy.

`act` carries out each decision at once. Some decisions touch a job that still runs (a job that
stands still, a broken loss, a rank that left the others with code 0, a node to be left). `propose`
proposes these decisions to a person, and carries them out after an approval; `observe` only records
them. If a rank or a node of a job has failed, `act` and `propose` start the job again; in `observe`
the run ends as the job has ended. The policy decides the same in all three modes.
"""

from dataclasses import dataclass
from typing import Literal

from holdfast.recover import policy

Mode = Literal["act", "propose", "observe"]
MODES: tuple[Mode, ...] = ("act", "propose", "observe")
APART_STEPS = 64
"""Steps after the last broken loss within which a further broken loss is the same finding."""

Finding = policy.JobFrozen | policy.LossBroken | policy.RankFailed | policy.NodeToLeave
"""A finding about a job that still runs, see `_of_running_job`."""


@dataclass(frozen=True)
class Approved:
    """A person has approved the proposal."""


@dataclass(frozen=True)
class WentOn:
    """The job that stood still makes steps again."""


@dataclass(frozen=True)
class Propose:
    """Request a person's approval before the running job is ended."""

    finding: Finding


@dataclass(frozen=True)
class Note:
    """Record that the running job would have been ended."""

    finding: Finding


@dataclass(frozen=True)
class Withdraw:
    """The proposal is not valid any more."""

    why: str


Event = policy.Event | Approved | WentOn
Action = policy.Action | Propose | Note | Withdraw


@dataclass(frozen=True, kw_only=True)
class Held:
    """A decision that is not carried out: it waits for an approval, or is only recorded."""

    finding: Finding


@dataclass(frozen=True)
class Verdict:
    """The result of an event."""

    state: policy.State
    held: Held | None
    actions: tuple[Action, ...]


def decide(
    mode: Mode,
    limits: policy.RestartLimits,
    state: policy.State,
    held: Held | None,
    event: Event,
    now_s: float,
) -> Verdict:
    """Return the next state, the held decision and the actions.

    Args:
        mode: the mode of the run.
        limits: the limits of the policy.
        state: the state of the policy.
        held: the decision that was held before the event.
        event: the event.
        now_s: the present time, in monotonic seconds.
    """
    running = state.phase is policy.Phase.RUNNING
    if isinstance(event, WentOn):
        if held is not None and isinstance(held.finding, policy.JobFrozen):
            return Verdict(state, None, (Withdraw("the job makes steps again."),))
        return Verdict(state, held, ())
    if isinstance(event, Approved):
        if held is None or not running or mode != "propose":
            return Verdict(state, held, ())
        after, actions = policy.decide(limits, state, held.finding, now_s)
        return Verdict(after, None, actions)
    after, actions = policy.decide(limits, state, event, now_s)
    finding = _of_running_job(event) if running and mode != "act" else None
    if finding is not None:
        return _hold(mode, state, held, finding, after)
    if mode == "observe" and isinstance(event, policy.Diagnosed):
        after, actions = _not_restarted(after, actions, event)
    if held is not None and running and after.phase is not policy.Phase.RUNNING:
        return Verdict(after, None, (Withdraw("the attempt has ended."), *actions))
    return Verdict(after, held, actions)


def _of_running_job(event: policy.Event) -> Finding | None:
    if isinstance(event, policy.RankFailed):
        return event if event.others_run else None
    if isinstance(event, policy.JobFrozen | policy.LossBroken | policy.NodeToLeave):
        return event
    return None


def _hold(
    mode: Mode,
    state: policy.State,
    held: Held | None,
    event: Finding,
    after: policy.State,
) -> Verdict:
    if after.phase is policy.Phase.RUNNING:
        return Verdict(after, held, ())  # the policy itself goes on with the training
    if held is not None and isinstance(event, policy.RankFailed | policy.NodeToLeave):
        # The rank has left for good, and each launch leaves the node: the other finding goes first.
        return Verdict(state, held, ())
    now_held = Held(finding=event)
    if held is not None and _is_same(held.finding, event):
        return Verdict(state, now_held, ())
    action = Propose(event) if mode == "propose" else Note(event)
    return Verdict(state, now_held, (action,))


def _is_same(before: Finding, now: Finding) -> bool:
    if isinstance(before, policy.LossBroken) and isinstance(now, policy.LossBroken):
        return now.step <= before.step + APART_STEPS
    return type(before) is type(now)


def _not_restarted(
    after: policy.State, actions: tuple[policy.Action, ...], event: policy.Diagnosed
) -> tuple[policy.State, tuple[policy.Action, ...]]:
    """End the run if the policy would have started the job again."""
    planned = next((one for one in actions if isinstance(one, policy.Resolve)), None)
    if planned is None or planned.action != "restart":
        return after, actions
    why = f"In the mode observe nothing is restarted. In the mode act the job would have been: {planned.explanation}"
    outcome = f"{event.summary} {why} Go on by `holdfast run --resume`."
    ended, ends = policy.finish(after, policy.End(state="failed", exit_code=1, outcome=outcome))
    return ended, (policy.Resolve(action="stop", explanation=why, rule="observe"), *ends)
