"""Choose by the mode which of the policy's decisions are carried out, as a pure function.

The policy decides the same in all three modes:

- `act` carries out each decision at once.
- `propose` proposes a decision to a person if it would end a job that still runs, and carries it
  out after an approval. Reasons for such decisions are a hang, a broken loss, a rank that left the
  others with exit code 0, and a node that the job must leave. If a rank or a node has failed, the
  job is restarted at once.
- `observe` only records the decisions about a running job. If a rank or a node has failed, the run
  ends.
"""

from dataclasses import dataclass
from typing import Literal

from holdfast.recover import policy

Mode = Literal["act", "propose", "observe"]
MODES: tuple[Mode, ...] = ("act", "propose", "observe")
APART_STEPS = 64
"""A broken loss within this number of steps of the last one counts as the same finding."""

Finding = policy.JobFrozen | policy.LossBroken | policy.RankFailed | policy.NodeToLeave
"""A finding about a job that still runs (see `_of_running_job`)."""


@dataclass(frozen=True)
class Approved:
    """A person has approved the proposal."""


@dataclass(frozen=True)
class WentOn:
    """The job that hung makes steps again."""


@dataclass(frozen=True)
class Propose:
    """Request a person's approval to end the running job."""

    finding: Finding


@dataclass(frozen=True)
class Note:
    """Record that the running job would have been ended."""

    finding: Finding


@dataclass(frozen=True)
class Withdraw:
    """Withdraw the proposal, which is no longer valid."""

    why: str


Event = policy.Event | Approved | WentOn
Action = policy.Action | Propose | Note | Withdraw


@dataclass(frozen=True, kw_only=True)
class Held:
    """A decision that is not carried out, because it waits for an approval or is only recorded."""

    finding: Finding


@dataclass(frozen=True)
class Verdict:
    """The result of a decision: the next state, the held decision and the actions."""

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
        held: the decision that was held before the event; None if there was none.
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
        return Verdict(after, held, ())  # the policy itself lets the training continue
    if held is not None and isinstance(event, policy.RankFailed | policy.NodeToLeave):
        # Keep the held finding. `event` is less urgent: a failed rank stays away, and the next
        # launch leaves the node in any case.
        return Verdict(state, held, ())
    now_held = Held(finding=event)
    if held is not None and _is_same(held.finding, event):
        return Verdict(state, now_held, ())
    action = Propose(event) if mode == "propose" else Note(event)
    return Verdict(state, now_held, (action,))


def _is_same(before: Finding, now: Finding) -> bool:
    if isinstance(before, policy.LossBroken) and isinstance(now, policy.LossBroken):
        return (now.step if now.since is None else now.since) <= before.step + APART_STEPS
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
