"""Record each decision once, and read approvals from the run's folder.

A record contains the input of the policy (state, finding), its decision (plan, rule) and the mode.
It has the same form in all modes. It is written after the decided action has begun, so that the
ledger does not delay a restart.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.recover import policy
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.people import modes
from holdfast.recover.people.signals import signals_of
from holdfast.recover.spec import RunSpec

if TYPE_CHECKING:  # the process of a node needs neither the diagnosis nor the recorder
    from holdfast.recover.attempt import AttemptView
    from holdfast.recover.recorder import Recorder

ENDING = (policy.Phase.FAILING, policy.Phase.DIAGNOSING)
PROPOSALS = ("proposal", "approved", "withdrawn")
"""The kinds of events about proposals."""
READ_BYTES = 64
NUMBERS = 1_000_000_000
KINDS: Mapping[type[Any], str] = {
    policy.RankFailed: "rank_failed",
    policy.JobExited: "job_exited",
    policy.JobFrozen: "job_frozen",
    policy.LossBroken: "loss_broken",
    policy.NodeToLeave: "node_to_leave",
    policy.Diagnosed: "diagnosed",
    policy.NodesMissing: "nodes_missing",
    modes.Approved: "approved",
}
"""The name of each kind of finding in the record of a decision."""
NOT_DONE = "Nothing is done, since the mode is observe."
FOLLOWED = "another supervisor has taken over, and decides again."


class Decisions:
    """The decisions of one run."""

    def __init__(
        self,
        spec: RunSpec,
        recorder: "Recorder",
        approved: Path,
        observe: Callable[[str, Mapping[str, Any]], None],
        coverage: Callable[[], Mapping[str, list[str]]] = dict,
    ) -> None:
        """Store the collaborators; there is no decision yet.

        Args:
            spec: the specification of the run.
            recorder: the recorder of the run.
            approved: the file to which `holdfast runs approve` writes the number of the approved
                proposal.
            observe: receives the events of the run.
            coverage: a function that returns the sources of the nodes' signals (see `signals_of`).
        """
        self._coverage = coverage
        self._spec = spec
        self._recorder = recorder
        self._approved = approved
        self._observe = observe
        self._held: modes.Held | None = None
        self._anomaly: Anomaly | None = None
        """The first broken loss that the held decision is about."""
        self._is_taken_up = False
        """True until the first broken loss after a held one was taken up."""
        self._seen_from: int | None = None
        """The first step with a loss that was looked at after the held loss was taken up."""
        self._number: int | None = None
        """The number of the proposal that waits for an approval."""

    def take_up(self) -> None:
        """Continue to hold the broken loss that an earlier supervisor held, if there is one."""
        if self._spec.mode == "observe":
            seen = [
                data.get("anomaly")
                for _, attempt, data in self._recorder.events("observed")
                if attempt == self._recorder.attempt
            ]
            self._hold_loss(next((one for one in reversed(seen) if one is not None), None))
            return
        open_one = open_proposal(self._recorder.events(*PROPOSALS), self._recorder.attempt)
        if open_one is None:
            return
        if self._spec.mode == "propose" and self._hold_loss(open_one.get("anomaly")):
            self._number = int(open_one["number"])
        else:
            self._recorder.event("withdrawn", {"number": open_one.get("number"), "why": FOLLOWED})

    def _hold_loss(self, found: Mapping[str, Any] | None) -> bool:
        """Hold the broken loss in a record; return True if the record has one."""
        if found is None:
            return False
        self._anomaly = anomaly = Anomaly.of_json(found)
        loss = policy.LossBroken(step=anomaly.step, is_spike=anomaly.kind == "spike")
        self._held = modes.Held(finding=loss)
        self._is_taken_up = True
        return True

    @property
    def holds_hang(self) -> bool:
        """True if a decision about a hang is held, which means not carried out yet."""
        return self._held is not None and isinstance(self._held.finding, policy.JobFrozen)

    @property
    def holds_loss(self) -> bool:
        """True if a decision about a broken loss is held, which means not carried out yet."""
        return self._held is not None and isinstance(self._held.finding, policy.LossBroken)

    def looked_at(self, step: int) -> None:
        """Record that the detector has received the loss of a step."""
        if self._is_taken_up and self._seen_from is None:
            self._seen_from = step

    def is_approved(self) -> bool:
        """Return True if a person has approved the waiting proposal."""
        if self._number is None:
            return False
        try:
            with self._approved.open("rb") as approved:
                content = approved.read(READ_BYTES)
        except OSError:
            return False
        return content.strip() == str(self._number).encode()

    def decide(
        self, view: "AttemptView", state: policy.State, event: modes.Event, now_s: float
    ) -> modes.Verdict:
        """Decide on an event (see `modes.decide`)."""
        held = self._held
        if self._is_taken_up and isinstance(event, policy.LossBroken):
            self._is_taken_up = False
            since = event.step if event.since is None else event.since
            seen_from = self._seen_from
            is_same = seen_from is not None and since <= seen_from + modes.APART_STEPS
            if self.holds_loss and is_same:
                # The loss was broken, and nobody saw the steps until now: it is the same finding.
                held = modes.Held(finding=event)
        verdict = modes.decide(self._spec.mode, self._spec.restarts, state, held, event, now_s)
        self._held = verdict.held
        if isinstance(event, modes.Approved) and verdict.state is not state:
            view.anomaly = self._anomaly
            self._recorder.event("approved", {"number": self._number})
        if verdict.held is None:
            self._anomaly = self._number = None
        return verdict

    def record(
        self,
        view: "AttemptView",
        before: policy.State,
        event: modes.Event,
        verdict: modes.Verdict,
        now_s: float,
    ) -> None:
        """Record the decision on an event, if there was one."""
        for action in verdict.actions:
            match action:
                case modes.Propose() | modes.Note():
                    self._hold(view, action)
                case modes.Withdraw() if self._spec.mode == "propose":
                    self._recorder.event("withdrawn", {"why": action.why})
        is_end = before.phase not in ENDING and verdict.state.phase in ENDING
        was_held = any(isinstance(one, modes.Propose | modes.Note) for one in verdict.actions)
        is_left = isinstance(event, policy.LossBroken) and not verdict.actions and not verdict.held
        is_diagnosed = isinstance(event, policy.Diagnosed | policy.NodesMissing)
        is_node = isinstance(event, policy.NodeToLeave | modes.Approved) and bool(verdict.actions)
        if not (is_end or was_held or is_diagnosed or is_left or is_node):
            return
        decision: dict[str, Any] = {
            "mode": self._spec.mode,
            "state": _state(before),
            "finding": {
                "kind": KINDS.get(type(event), type(event).__name__),
                **_finding(view, event),
            },
            "plan": _plan(before, event, verdict, now_s),
        }
        if is_end or was_held or is_node:
            decision["signals"] = signals_of(
                view, healthy_after=self._spec.healthy_after, nodes=self._coverage()
            )
        self._recorder.event("decision", decision)

    def _hold(self, view: "AttemptView", action: modes.Propose | modes.Note) -> None:
        anomaly = self._anomaly = view.anomaly
        text = proposal_text(view, action.finding)
        number = secrets.randbelow(NUMBERS)  # so that approvals of other proposals do not match
        data = {
            "number": number,
            "text": text,
            "finding": KINDS.get(type(action.finding), type(action.finding).__name__),
            "anomaly": None if anomaly is None else anomaly.to_json(),
        }
        if isinstance(action, modes.Note):
            self._recorder.event("observed", data)
            self._observe("observed", {"text": f"{text} {NOT_DONE}"})
            return
        self._number = number
        self._recorder.event("proposal", data)
        self._observe("proposal", {"text": text, "run": self._recorder.run_id})


def open_proposal(
    events: list[tuple[str, int, dict[str, Any]]], attempt: int
) -> dict[str, Any] | None:
    """Return the data of the proposal that waits for an approval; None if there is none.

    Args:
        events: the kind, attempt and data of all events of the kinds `PROPOSALS`, in order.
        attempt: the newest attempt. A proposal about an earlier attempt is no longer valid.
    """
    kind, proposed, data = events[-1] if events else ("", 0, {})
    return data if (kind, proposed) == ("proposal", attempt) else None


def proposal_text(view: "AttemptView", finding: modes.Finding) -> str:
    """Return the finding and the proposal, as two sentences."""
    if isinstance(finding, policy.NodeToLeave):
        return f"Node {finding.node} must be left: {finding.why}. Proposed: save the state, and go on without it."
    if isinstance(finding, policy.RankFailed):
        who = "A rank" if view.left is None else f"Rank {view.left.rank}"
        return (
            f"{who} has ended with code 0 in the middle of the training, and the others run without that rank. "
            "Proposed: end the attempt, and go on from the newest checkpoint."
        )
    if view.anomaly is not None:
        what = "jumped and stays" if view.anomaly.kind == "spike" else "is not finite"
        return (
            f"The loss {what} since step {view.anomaly.first_step}. Proposed: end the attempt, and go on from the "
            "newest healthy checkpoint before that."
        )
    frozen = view.frozen
    named = frozen is not None and frozen.rank is not None
    who = f"Rank {view.blamed_rank} is frozen" if named else "The job stands still"
    waited = "" if frozen is None else f": no step for {frozen.waited_s:.0f} s"
    return f"{who}{waited}. Proposed: end the attempt, and go on from the newest checkpoint."


def _state(state: policy.State) -> dict[str, Any]:
    return {
        "phase": state.phase.value,
        "restarts_in_vain": len(state.vain_at_s),
        "roots_since_gain": [root for root, _ in state.roots_since_gain],
        "best_step": state.best_step,
        "best_checkpoint_step": state.best_checkpoint_step,
        "spike_step": state.spike_step,
        "broken_step": state.broken_step,
        "stop_by": state.stop_by,
    }


def _finding(view: "AttemptView", event: modes.Event) -> dict[str, Any]:
    if isinstance(event, policy.Diagnosed | policy.NodesMissing | policy.NodeToLeave):
        return asdict(event)
    found: dict[str, Any] = {
        "rank": view.blamed_rank,
        "node": view.lost_node,
        "step": view.last_step,
    }
    if view.anomaly is not None:
        found["anomaly"] = view.anomaly.to_json()
    elif view.frozen is not None:
        found["frozen"] = asdict(view.frozen)
    elif view.culprit is not None:
        found["exit_code"], found["signal"] = view.culprit.exit_code, view.culprit.signal
    return found


def _plan(
    before: policy.State, event: modes.Event, verdict: modes.Verdict, now_s: float
) -> dict[str, Any]:
    after = verdict.state
    resolve = next((one for one in verdict.actions if isinstance(one, policy.Resolve)), None)
    wait_s = 0.0
    if after.phase is policy.Phase.WAITING and after.deadline_s is not None:
        wait_s = max(0.0, after.deadline_s - now_s)
    if resolve is not None:
        plan = {"action": resolve.action, "rule": resolve.rule, "explanation": resolve.explanation}
        return {**plan, "wait_s": wait_s}
    action, rule = _ending(before, event, verdict)
    return {"action": action, "rule": rule, "explanation": "", "wait_s": wait_s}


def _ending(before: policy.State, event: modes.Event, verdict: modes.Verdict) -> tuple[str, str]:
    """Return the decision about a running job, and the rule that made it."""
    actions = verdict.actions
    if any(isinstance(one, modes.Propose) for one in actions):
        return "propose to end the attempt", "propose"
    if any(isinstance(one, modes.Note) for one in actions):
        return "go on", "note"
    if isinstance(event, policy.NodesMissing):
        return ("queue again", "queued-again") if event.queued else ("stop", "nodes-missing")
    if not actions:
        return "go on", "go-on"
    if isinstance(event, policy.NodeToLeave):
        return "save the state, and go on without the node", event.rule
    if isinstance(event, modes.Approved):
        is_move = verdict.state.is_moving
        return (
            "save the state, and go on without the node" if is_move else "end the attempt",
            "approved",
        )
    return "end the attempt", policy.rule_of(before, event)
