"""Build the story of a run from its records: faults, signals, decisions, actions, checks, costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from holdfast.core import words
from holdfast.core.accounting import IncidentSummary, LostCause, RunSummary, gpu_hours, summarize
from holdfast.core.explanation.plain_words import (
    RULES,
    SENTENCE_LIMIT,
    cause,
    event_note,
    observed_failure,
)
from holdfast.core.explanation.training_words import class_note
from holdfast.core.ledger import Event, Incident, Ledger

OF_INCIDENT = ("nodes_tested", "nodes_not_tested", "nodes_marked", "nodes_readmitted")
"""Kinds of events that become part of an incident, if their attempt ended in an incident."""


@dataclass(frozen=True, kw_only=True)
class Signals:
    """The signals that the supervisor read, or could not read, when a failure happened."""

    looked_at: tuple[str, ...] = ()
    """A phrase for each signal that the supervisor read."""
    not_seen: tuple[str, ...] = ()
    """A phrase for each signal that could not be read, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of the recovery policy."""

    at_s: float
    """The time of the decision, in Unix seconds."""
    mode: str
    """The mode of the supervision: `act`, `propose` or `observe`."""
    finding: Mapping[str, Any]
    state: Mapping[str, Any]
    """The state of the policy before the decision."""
    plan: Mapping[str, Any]
    """The plan that was decided, with the keys `action`, `explanation` and `wait_s`."""
    rule: str
    """The meaning of the rule that led to the decision."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a log that is cited as evidence."""

    role: str
    place: str
    text: str


@dataclass(frozen=True, kw_only=True)
class IncidentStory:
    """One incident, from its fault to the check of the action's effect."""

    number: int
    """The number of the incident in its run, from 1."""
    incident_id: int | None
    attempt: int
    what: str
    """The observed failure, without a full stop."""
    at_s: float
    """The time of the fault in Unix seconds, as exact as the records are."""
    detected_after_s: float
    rank: int | None
    node: str | None
    """The lost node; if no node was lost, the node of the rank at fault."""
    step: int | None
    place: str
    """The place in the training, such as "after step 36"."""
    signals: Signals | None
    """The signals at the failure; None if the run is older than the recording of signals."""
    cause: str
    confidence: float | None
    evidence: tuple[Line, ...]
    advice: str
    decisions: tuple[Decision, ...]
    done: str
    check: str
    """The effect of the action, as a sentence."""
    is_settled: bool
    """True if the job trains again, or the run has ended."""
    resumed_after_s: float | None
    """Seconds from the detection to the first new step."""
    steps_again: int | None
    lost_s: float
    """Wall-clock seconds that the incident cost, as the mean over the ranks."""
    lost_gpu_hours: float
    lost: Mapping[LostCause, float]
    """Lost rank-seconds by cause."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """An event of the run that belongs to no incident."""

    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class RunStory:
    """The story of one run: its incidents and notes."""

    summary: RunSummary
    chain: tuple[IncidentStory | Note, ...]
    """The incidents and notes, ordered by time."""

    @property
    def incidents(self) -> tuple[IncidentStory, ...]:
        """The incidents of `chain`, without the notes."""
        return tuple(one for one in self.chain if isinstance(one, IncidentStory))


def explain(ledger: Ledger, home: Path, run_id: str) -> RunStory:
    """Return the story of a run; the run may still be in progress.

    Args:
        ledger: the ledger that holds the run.
        home: `$HOLDFAST_HOME`, the folder above the run's journal of steps.
        run_id: the name of the run.

    Raises:
        NotFound: there is no such run.
        HoldfastError: the journal is damaged.
        LedgerError: the ledger cannot be read.
    """
    return story_of(summarize(ledger, home, run_id), ledger.events(run_id))


def story_of(summary: RunSummary, events: Sequence[Event]) -> RunStory:
    """Return the story of a run from records that were read before; see `explain`.

    This is a pure function of the records.

    Args:
        summary: the summary of the run.
        events: the events of the run, in the order of their records.
    """
    by_attempt: dict[int, list[Event]] = {}
    for event in events:
        by_attempt.setdefault(event.attempt, []).append(event)
    failed = {cost.incident.attempt for cost in summary.incidents}
    notes = [
        Note(at_s=event.at_s, text=_clean(text))
        for event in events
        if (text := event_note(event, summary.run.run_id)) is not None
        and not (event.kind in OF_INCIDENT and event.attempt in failed)
    ]
    incidents = [_incident(cost, summary, by_attempt) for cost in summary.incidents]
    entries: list[IncidentStory | Note] = [*notes, *incidents]
    entries.sort(key=lambda one: one.at_s)
    return RunStory(summary=summary, chain=tuple(entries))


def _incident(
    cost: IncidentSummary, summary: RunSummary, by_attempt: Mapping[int, Sequence[Event]]
) -> IncidentStory:
    incident = cost.incident
    events, found = by_attempt.get(incident.attempt, ()), incident.diagnosis
    rank_s = summary.lost_time.incident_s(cost.number)
    check, is_settled = _check(cost, summary)
    return IncidentStory(
        number=cost.number,
        incident_id=incident.incident_id,
        attempt=incident.attempt,
        what=observed_failure(incident, events),
        at_s=cost.fault_at_s,
        detected_after_s=cost.seconds_to_detect,
        rank=incident.rank,
        node=cost.node,
        step=incident.step,
        place=_place(incident),
        signals=_signals(events),
        cause=cause(found),
        confidence=_number(found.get("confidence")),
        evidence=tuple(_evidence(found, incident.run_id)),
        advice=_clean(found.get("mitigation") or ""),
        decisions=tuple(_decision(one) for one in events if one.kind == "decision"),
        done=" ".join(
            [
                _done(cost),
                *_node_notes(events, incident.run_id),
                *map(_clean, class_note(chain(*by_attempt.values()), incident.attempt)),
            ]
        ),
        check=check,
        is_settled=is_settled,
        resumed_after_s=cost.seconds_to_restart,
        steps_again=cost.steps_lost,
        lost_s=rank_s / summary.lost_time.ranks,
        lost_gpu_hours=gpu_hours(rank_s),
        lost=summary.lost_time.by_incident.get(cost.number, {}),
    )


def _place(incident: Incident) -> str:
    if not incident.step:
        return "before the first step"
    # The headline names the first step with a broken loss, which becomes certain at a later step.
    return f"{'found at' if incident.kind == 'anomaly' else 'after'} step {incident.step}"


def _signals(events: Sequence[Event]) -> Signals | None:
    found = [event.data.get("signals") for event in events if event.kind == "decision"]
    recorded = [one for one in found if isinstance(one, Mapping)]
    if not recorded:
        return None
    looked_at, not_seen = (
        tuple(_clean(one) for one in recorded[-1].get(name) or ())
        for name in ("looked_at", "not_seen")
    )
    return Signals(looked_at=looked_at, not_seen=not_seen)


def _evidence(found: Mapping[str, Any], run_id: str) -> list[Line]:
    cited = [one for one in found.get("evidence") or () if isinstance(one, Mapping)]
    return [
        Line(
            role=str(one.get("role", "")),
            place=f"{within_run(_clean(one.get('file', '')), run_id)}:{one.get('line', '?')}",
            text=_clean(one.get("text", "")),
        )
        for one in cited
    ]


def within_run(file: str, run_id: str) -> str:
    """Return a log file's path relative to the run's folder.

    The relative path still names the attempt, so that logs of two attempts have different names.
    """
    return file.rpartition(f"/runs/{run_id}/")[2]


def _decision(event: Event) -> Decision:
    data = event.data
    plan = data.get("plan") or {}
    name = str(plan.get("rule", ""))
    return Decision(
        at_s=event.at_s,
        mode=str(data.get("mode", "act")),
        finding=data.get("finding") or {},
        state=data.get("state") or {},
        plan=plan,
        rule=RULES.get(name, name),
    )


def _node_notes(events: Sequence[Event], run_id: str) -> list[str]:
    """Return sentences about the nodes that belong to an incident: tests, cordons, returns."""
    found = [event_note(event, run_id) for event in events if event.kind in OF_INCIDENT]
    return [_clean(text) for text in found if text is not None]


def _done(cost: IncidentSummary) -> str:
    incident = cost.incident
    if incident.action == "stop":
        return f"Every process of the job was ended, and the run with it. {incident.explanation}".strip()
    if not incident.action:
        return "Nothing is recorded yet."
    passed = "".join(
        f" The checkpoint of step {one.step} was passed over: {_clean(one.reason)}."
        for one in cost.passed_over
    )
    if incident.restored_step is None:
        return f"Every process of the job was ended, and the job was started again.{passed}"
    where = f"step {incident.restored_step}"
    if cost.restore_s is not None:
        where = f"the checkpoint of {where} (read in {_duration(cost.restore_s)})"
    return f"Every process of the job was ended, and the job went on from {where}.{passed}"


def _check(cost: IncidentSummary, summary: RunSummary) -> tuple[str, bool]:
    """Return the effect of the action as a sentence, and True if the incident is settled."""
    incident = cost.incident
    if incident.resumed_at_s is not None and cost.seconds_to_restart is not None:
        step = "" if incident.restored_step is None else f" at step {incident.restored_step + 1}"
        again = (
            f", with {words.plainly(cost.steps_lost, 'step')} to make again"
            if cost.steps_lost
            else ""
        )
        return (
            f"Training resumed{step}, {_duration(cost.seconds_to_restart)} after the detection{again}.",
            True,
        )
    if cost.number < len(summary.incidents):
        return "It had no effect: the next incident came before a step.", True
    if summary.run.state == "queued":
        return "The run is queued again.", False
    if summary.run.state != "running":
        return f"The run ended: {summary.run.state}.", True
    return "Not yet: no step since then.", False


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _duration(seconds: float) -> str:
    return words.duration(seconds).replace(words.NBSP, " ")


def _clean(text: object) -> str:
    return words.shorten(" ".join(words.clean(str(text)).split()), SENTENCE_LIMIT)
