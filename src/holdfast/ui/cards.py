"""Build an incident's card: the injected fault, the observation, the diagnosis and the action."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core import words
from holdfast.core.accounting import IncidentSummary, RunSummary
from holdfast.core.explanation import within_run
from holdfast.core.ledger import Incident
from holdfast.core.page import KeyFigure
from holdfast.ui.cited import own_frame

EVIDENCE_LIMIT = 25
SHOWN_LIMIT = 3
"""The most lines of evidence that are shown without unfolding the card."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A log line that is cited as evidence."""

    role: str
    place: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """The texts and figures of one incident."""

    number: int
    title: str
    injected: tuple[str, ...]
    seen: str
    reason: str
    verdict: str
    evidence: tuple[Evidence, ...]
    """The main lines: the root, the user's own frame in the traceback, and one more line."""
    folded: tuple[Evidence, ...]
    """Further cited lines, which the page shows after a click."""
    evidence_left_out: int
    done: str
    why: str
    next_step: str
    passed_over: tuple[str, ...]
    figures: tuple[KeyFigure, ...]


_SEEN = {"hang": "stopped making steps", "anomaly": "reported a broken loss"}
"""The text for a kind of incident that is not the end of a process."""
_LOSSES = {
    "observer-spike": "The loss spiked",
    "observer-not-finite": "The loss was no longer a finite number",
}
"""The text for a broken loss, by the rule that decided the diagnosis."""
_ENDS = {
    "observer-killed": "was killed",
    "task-killed": "was killed",
    "observer-terminated": "received a signal to end",
    "observer-left": "left the others",
}
"""The text for the end of a rank, by the rule that decided the diagnosis."""
_LAUNCHERS = {"observer-launcher", "launcher-killed"}
"""The rules that decide the diagnosis if the launcher ended."""
_OBSERVED = re.compile(r"^\S+Z holdfast: ")
"""Match the start of a line in the supervisor's log of observations."""
OTHERS = "Others"
"""The reason of failures that Table 3 of the study does not list."""


def incident_card(cost: IncidentSummary, summary: RunSummary, *, home: Path | None = None) -> Card:
    """Return the card of one incident of a run.

    A diagnosis from another version of Holdfast may lack fields; the card shows the fields that
    exist. `home` is the folder above the run's folder, where the logs are searched for the user's
    own frame. Without `home`, no log is read.
    """
    incident, found = cost.incident, cost.incident.diagnosis
    step = f"at step {incident.step}" if incident.step else "before its first step"
    evidence = _evidence(found, incident.run_id)
    shown = _shown(evidence, home, incident.run_id)
    rest = [line for line in evidence if line not in shown]
    lost_s = summary.lost_time.incident_s(cost.number)
    figures = [KeyFigure(name="to detect", value=words.duration(cost.seconds_to_detect))]
    if cost.seconds_to_restart is not None:
        figures.append(KeyFigure(name="to restart", value=words.duration(cost.seconds_to_restart)))
    if cost.steps_lost is not None:
        figures.append(KeyFigure(name="steps lost", value=str(cost.steps_lost)))
    if lost_s > 0:
        figures.append(KeyFigure(name="lost over all ranks", value=words.duration(lost_s)))
    return Card(
        number=cost.number,
        title=_title(cost, step),
        injected=tuple(_injected(data) for data in cost.injected),
        seen=_seen(cost, summary),
        reason=_reason(found),
        verdict=_verdict(found),
        evidence=tuple(shown),
        folded=tuple(rest[: EVIDENCE_LIMIT - SHOWN_LIMIT]),
        evidence_left_out=max(0, len(rest) - (EVIDENCE_LIMIT - SHOWN_LIMIT)),
        done=_done(cost, summary),
        why=incident.explanation,
        next_step="" if incident.action == "restart" else str(found.get("mitigation") or ""),
        passed_over=tuple(
            f"step {passed.step} ({passed.path}): {passed.reason}" for passed in cost.passed_over
        ),
        figures=tuple(figures),
    )


def _title(cost: IncidentSummary, step: str) -> str:
    """Return the observed failure as text; the name of an injected fault comes before it."""
    named = f"{cost.injected[-1].get('fault')}: " if cost.injected else ""
    bad = f"; {', '.join(cost.cordoned)} was bad" if cost.cordoned else ""
    return f"{named}{_happened(cost.incident, cost.node)} {step}{bad}"


def _happened(incident: Incident, node: str | None) -> str:
    decided, scope = incident.diagnosis.get("decided_by"), incident.diagnosis.get("scope")
    rule = str(decided[0]) if isinstance(decided, list) and decided else ""
    if incident.kind == "anomaly":
        return _LOSSES.get(rule, "The loss broke")
    if rule in _LAUNCHERS:
        return "The launcher died"
    if rule == "observer-node" and isinstance(scope, Mapping) and "node" in scope:
        return f"Node {scope['node']} was lost"
    where = "" if node is None else f" on {node}"
    who = "A rank" if incident.rank is None else f"Rank {incident.rank}{where}"
    return f"{who} {'froze' if incident.kind == 'hang' else _ENDS.get(rule, 'exited')}"


def _reason(found: Mapping[str, Any]) -> str:
    reason, root = found.get("reason"), found.get("root_line")
    if reason == OTHERS and isinstance(root, Mapping) and root.get("text"):
        text = _OBSERVED.sub("", str(root["text"]))
        return f"{text[:1].upper()}{text[1:]}"
    return str(reason or "No diagnosis is recorded.")


def _injected(data: Mapping[str, Any]) -> str:
    fault, detail = str(data.get("fault", "a fault")), str(data.get("detail", ""))
    return f"{fault[:1].upper()}{fault[1:]}: {detail}" if detail else fault


def _seen(cost: IncidentSummary, summary: RunSummary) -> str:
    incident = cost.incident
    who = "A rank" if incident.rank is None else f"Rank {incident.rank}"
    what = f"{who} {_SEEN.get(incident.kind, 'ended first')}"
    after = words.duration(max(0.0, incident.detected_at_s - summary.run.started_at_s))
    return f"{what} in attempt {incident.attempt}; seen {after} after the first start."


def _verdict(found: Mapping[str, Any]) -> str:
    phrases = []
    if found.get("category"):
        phrases.append(str(found["category"]))
    confidence = found.get("confidence")
    if isinstance(confidence, int | float):
        phrases.append(f"confidence {words.percent(float(confidence))}")
    elif confidence:
        phrases.append(f"confidence {confidence}")
    if found.get("action"):
        phrases.append(f"advises {str(found['action']).replace('_', ' ')}")
    if isinstance(found.get("restart_helps"), bool):
        phrases.append("a restart helps" if found["restart_helps"] else "a restart does not help")
    decided = found.get("decided_by")
    if isinstance(decided, list) and decided:
        phrases.append("decided by " + ", ".join(map(str, decided)))
    return " · ".join(phrases)


def _evidence(found: Mapping[str, Any], run_id: str) -> list[Evidence]:
    lines = [line for line in found.get("evidence") or () if isinstance(line, Mapping)]
    root = found.get("root_line")
    if isinstance(root, Mapping):
        place = (root.get("file"), root.get("line"))
        if all((line.get("file"), line.get("line")) != place for line in lines):
            lines = [{**root, "role": "root"}, *lines]
    return [
        Evidence(
            role=str(line.get("role", "")),
            place=f"{within_run(str(line.get('file', 'unknown file')), run_id)}:{line.get('line', '?')}",
            text=str(line.get("text", "")),
        )
        for line in lines
    ]


def _shown(evidence: list[Evidence], home: Path | None, run_id: str) -> list[Evidence]:
    """Choose the lines to show first: the root, the user's own frame, and further lines."""
    in_order = sorted(evidence, key=lambda line: line.role != "root")
    roots = [line for line in in_order if line.role == "root"]
    frame = None if home is None or not roots else own_frame(home, run_id, roots[0].place)
    if frame is None:
        return in_order[:SHOWN_LIMIT]
    place, text = frame
    own = Evidence(role="your code", place=place, text=text)
    return [in_order[0], own, *(line for line in in_order[1:] if line.place != place)][:SHOWN_LIMIT]


def _done(cost: IncidentSummary, summary: RunSummary) -> str:
    incident = cost.incident
    if incident.action == "stop":
        return "Stopped, no restart."
    if not incident.action:
        return "Nothing yet." if summary.run.state == "running" else "Nothing is recorded."
    done = (
        "Restarted"
        if incident.action == "restart"
        else incident.action.replace("_", " ").capitalize()
    )
    if cost.cordoned:
        done = f"Took {', '.join(cost.cordoned)} out of use. {done}"
    if incident.restored_step is None:
        return f"{done}."
    reading = "" if cost.restore_s is None else f", read in {words.duration(cost.restore_s)}"
    where = (
        f"the checkpoint of step {incident.restored_step}{reading}"
        if incident.restored_step
        else "step 0"
    )
    if incident.kind == "anomaly" and incident.action == "restart":
        return f"Went back to {where}."
    return f"{done} from {where}."
