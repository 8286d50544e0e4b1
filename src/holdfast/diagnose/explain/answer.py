"""Build the diagnosis from an explanation: the reason, cited lines, location, action, confidence."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from holdfast.diagnose.explain.confidence import support_of, sureness
from holdfast.diagnose.explain.diagnosis import Alternative, Diagnosis, Evidence, LogLine, Role
from holdfast.diagnose.explain.explain import (
    Explanation,
    FirstEnd,
    explain,
    first_end,
    rank_of,
)
from holdfast.diagnose.explain.locate import scope_of
from holdfast.diagnose.explain.memory_need import memory_advice
from holdfast.diagnose.explain.outcome import End, decide_end, stopped_by
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.logs.job_context import JobContext
from holdfast.diagnose.rules.rules import ENDING

ROOT_LINES: Final = 3
_EVIDENCE_LIMITS: Final[dict[Role, int]] = {
    "root": ROOT_LINES,
    "cascade": 6,
    "recovered": 4,
    "teardown": 4,
}
_WORTH_NAMING: Final = 0.03
"""Another reason is listed as an alternative if it has at least this share of the likelihood."""

_UNKNOWN: Final = (
    "No line of the logs states a known cause. Read the end of the log of the rank that ended first; "
    "if the failure returns at the same step, a restart does not help."
)


def answer(explanation: Explanation, everything: Sequence[Event], first: FirstEnd) -> Diagnosis:
    """Build the diagnosis of a job.

    Args:
        explanation: the candidates for the root, the most likely first.
        everything: all events of the job.
        first: the rank that ended first.
    """
    if not explanation.ranked:
        return Diagnosis(
            reason="Unknown",
            category="Unknown",
            evidence=_evidence(everything, ()),
            action="restart",
            restart_helps=True,
            mitigation=_UNKNOWN,
            confidence=0.2,
        )
    cluster = explanation.ranked[0]
    root = cluster.first
    same = _of_the_same_cause(explanation)
    stating = list(
        {(event.file, event.line): event for event in reversed(same) if event.line > 0}.values()
    )
    stating = stating[::-1][:ROOT_LINES]
    if root.line == 0:
        stating = []  # the supervisor observed the root; log lines may be unrelated
    lines = tuple(LogLine(file=event.file, line=event.line, text=event.cited) for event in stating)
    decided_by = [root.rule.id]
    if first.rank is not None and first.rank == rank_of(root) and first.rule_id != root.rule.id:
        decided_by.append(first.rule_id)
    confidence = sureness(support_of(explanation))
    others = {
        reason: found
        for reason, found in explanation.by_reason.items()
        if reason != root.rule.reason
    }
    return Diagnosis(
        outcome="stopped" if stopped_by(root) else "failed",
        reason=root.rule.reason,
        category=root.rule.category,
        root_line=lines[0] if lines else None,
        root_lines=lines,
        evidence=_evidence(everything, stating),
        scope=scope_of(cluster, same, everything),
        action=root.rule.action,
        restart_helps=root.rule.restart_helps,
        mitigation=_advice(root),
        confidence=confidence,
        alternatives=tuple(
            Alternative(
                reason=reason,
                confidence=round(min(other * one.first.rule.confidence, confidence), 3),
                decided_by=one.first.rule.id,
            )
            for reason, (other, one) in sorted(others.items(), key=lambda item: -item[1][0])[:3]
            if other >= _WORTH_NAMING
        ),
        decided_by=tuple(decided_by),
        root_text=root.text.strip(),
    )


def _advice(root: Event) -> str:
    reckoned = memory_advice(root.text) if root.rule.kind == "device_memory" else None
    return reckoned or root.rule.mitigation


def _of_the_same_cause(explanation: Explanation) -> list[Event]:
    """Return the events of the root, and of other candidates with equal kind, reason and survival."""
    cluster, rule = explanation.ranked[0], explanation.ranked[0].first.rule
    beside = [
        one
        for one in explanation.ranked[1:]
        if one.first.rule.kind == rule.kind and one.first.rule.reason == rule.reason
        and one.first.recovered == cluster.first.recovered and not one.first.demoted
    ]  # fmt: skip
    # The first line of each candidate comes first: three lines in different words carry more
    # evidence than three in the same words.
    firsts = [cluster.first, *(one.first for one in beside)]
    rest = [event for one in (cluster, *beside) for event in one.events[1:]]
    return firsts + rest


def _evidence(events: Sequence[Event], stating: Sequence[Event]) -> tuple[Evidence, ...]:
    by_role: dict[Role, list[Evidence]] = {role: [] for role in _EVIDENCE_LIMITS}
    cited = {(event.file, event.line) for event in stating}
    rest = [
        event
        for event in events
        if event.line > 0 and event.rule.kind != ENDING and (event.file, event.line) not in cited
    ]
    rest = list(
        {(event.file, event.line): event for event in reversed(_weightiest_first(rest))}.values()
    )
    for event in [*stating, *reversed(rest)]:
        role: Role = "cascade"
        if (event.file, event.line) in cited:
            role = "root"
        elif event.rule.kind == "teardown":
            role = "teardown"
        elif event.recovered:
            role = "recovered"
        if len(by_role[role]) < _EVIDENCE_LIMITS[role]:
            by_role[role].append(
                Evidence(file=event.file, line=event.line, text=event.cited, role=role)
            )
    return tuple(one for group in by_role.values() for one in group)


def _weightiest_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda one: (one.rule.weight, one.file, one.line))


def conclude(
    events: Sequence[Event],
    observed: Sequence[Event] = (),
    context: JobContext | None = None,
) -> Diagnosis:
    """Decide the outcome, explain the root and build the diagnosis.

    Args:
        events: the events found in the log files.
        observed: the events made from the supervisor's observations, which are in no log file.
        context: the supervisor's observations; their exit codes decide how the job ended.
    """
    present = {(event.rule.id, rank_of(event)) for event in events}
    everything = [
        *events,
        *(event for event in observed if (event.rule.id, rank_of(event)) not in present),
    ]
    end = decide_end(everything, context)
    if not end.has_cause:
        return _without_cause(end, everything)
    everything = [event for event in everything if id(event) not in end.survived]
    first = first_end(everything)
    found = answer(explain(everything, first), everything, first)
    return _with_end(found, end)


def _line_of(event: Event | None) -> LogLine | None:
    if event is None or event.line < 1:
        return None
    return LogLine(file=event.file, line=event.line, text=event.cited)


def _without_cause(end: End, everything: Sequence[Event]) -> Diagnosis:
    """Build the diagnosis for an end without a failure."""
    return Diagnosis(
        outcome=end.outcome,
        end_line=_line_of(end.stated_by),
        reason="Unknown",
        category="Unknown",
        evidence=tuple(
            replace(one, role="recovered") if one.role == "cascade" else one
            for one in _evidence(everything, ())
        ),
        action="none",
        restart_helps=False,
        mitigation=end.advice,
        confidence=end.confidence,
        decided_by=() if end.stated_by is None else (end.stated_by.rule.id,),
    )


def _with_end(found: Diagnosis, end: End) -> Diagnosis:
    """Return `found`, completed by the outcome and by the line that states the end."""
    found = replace(found, end_line=_line_of(end.stated_by))
    if end.outcome == "completed_teardown_failed":
        return replace(
            found, outcome=end.outcome, action="none", restart_helps=False, mitigation=end.advice
        )
    return found
