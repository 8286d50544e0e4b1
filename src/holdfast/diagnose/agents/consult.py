"""Consult a model about a diagnosis that the rules leave open.

A case that the rules decide is not sent to the model. In an open case, the model's finding replaces
the rules' answer if two conditions hold: the finding has the higher confidence, and a rule gives
the cited line the same reason. Otherwise the finding is added to the diagnosis as an alternative.
The confidence of a finding is always lower than the confidence of a rule that decides a case. All
other content of the model's answer is only a suggestion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.core.errors import HoldfastError
from holdfast.diagnose.agents import checks
from holdfast.diagnose.agents.endpoint import Endpoint
from holdfast.diagnose.agents.failure_agent import SAMPLES, Finding, Similar, find_cause
from holdfast.diagnose.agents.proposal import proposed_rule
from holdfast.diagnose.agents.untrusted import Draw, draw_mark
from holdfast.diagnose.explain.compress import Compressed, Kept, worth_reading
from holdfast.diagnose.explain.diagnosis import Alternative, Diagnosis, Evidence, LogLine
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import RuleSet

CEILING: Final = 0.55
"""The confidence of a unanimous finding, which is lower than the confidence of a rule that decides.
"""
_ALTERNATIVES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Consultation:
    """The result of a consultation."""

    diagnosis: Diagnosis
    proposed_rule: Mapping[str, Any] | None = None
    """The fields of a suggested rule that would match such a root next time; None without a
    suggestion. The suggestion is stored in the memory, and used only after checks (`memory.gate`).
    """


def consult(
    diagnosis: Diagnosis,
    compressed: Compressed,
    endpoint: Endpoint,
    *,
    similar: Similar | None = None,
    rules: RuleSet | None = None,
    samples: int = SAMPLES,
) -> Diagnosis:
    """Consult the model if the rules leave the case open; return the better founded diagnosis.

    If the endpoint fails, the result is `diagnosis` with a note about the failure.

    Args:
        diagnosis: the rules' answer.
        compressed: the compressed log.
        endpoint: the model.
        similar: a function that finds past incidents with a root like a given text.
        rules: the rules that made the diagnosis; by default the packaged ones.
        samples: the number of votes, which are independent answers of the model.
    """
    return consultation(
        diagnosis, compressed, endpoint, similar=similar, rules=rules, samples=samples
    ).diagnosis


def consultation(
    diagnosis: Diagnosis,
    compressed: Compressed,
    endpoint: Endpoint,
    *,
    similar: Similar | None = None,
    rules: RuleSet | None = None,
    samples: int = SAMPLES,
    draw: Draw = draw_mark,
) -> Consultation:
    """Do the same as `consult`, and also return the rule that the model suggests.

    `draw` returns random marks, which are put around outside text in prompts.
    """
    if diagnosis.ended_well or not worth_reading(diagnosis) or not compressed.lines:
        return Consultation(diagnosis=diagnosis)
    rules = packaged_rules() if rules is None else rules
    try:
        outcome = find_cause(
            diagnosis, compressed, endpoint, rules, similar=similar, samples=samples, draw=draw
        )
    except HoldfastError as error:  # without httpx or memory, the rules' answer remains
        return Consultation(diagnosis=_noted(diagnosis, str(error)))
    finding = outcome.finding
    if finding is None:
        consulted = (
            f"The model {endpoint.model} found no "
            "cause on which its answers agreed and that it could cite."
        )
        return Consultation(diagnosis=_noted(diagnosis, *outcome.notes, consulted))
    stops = not (diagnosis.restart_helps or checks.HELPS[finding.advised])
    if stops and diagnosis.reason != "Unknown":
        finding = replace(finding, action=finding.advised)  # the rules advise a stop, too
    decided = _noted(_decided(diagnosis, finding, endpoint, rules), *outcome.notes)
    if finding.action != finding.advised:
        lowered = (
            f"The model advises {finding.advised}; a model's advice alone only restarts the job."
        )
        decided = _noted(decided, lowered)
    return Consultation(diagnosis=decided, proposed_rule=_proposed(finding, endpoint, rules))


def _noted(diagnosis: Diagnosis, *notes: str) -> Diagnosis:
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))


def _decided(
    diagnosis: Diagnosis, finding: Finding, endpoint: Endpoint, rules: RuleSet
) -> Diagnosis:
    name = f"model:{endpoint.model}"
    sure = round(CEILING * finding.agreement, 3)
    if finding.reason == diagnosis.reason:
        # The action of the rules remains, since the rules have more evidence for their own reason.
        advice = f"{diagnosis.mitigation} A model adds, unproven: {finding.mitigation}"
        return replace(diagnosis, mitigation=advice, decided_by=(*diagnosis.decided_by, name))
    is_named = diagnosis.reason != "Unknown"
    agrees = checks.rule_agrees(finding.reason, finding.roots[0], rules)
    if is_named and (diagnosis.confidence >= sure or not agrees):
        other = Alternative(reason=finding.reason, confidence=sure, decided_by=name)
        return replace(diagnosis, alternatives=_ranked(other, *diagnosis.alternatives))
    lines = tuple(LogLine(file=one.file, line=one.line, text=one.text) for one in finding.roots)
    others = [
        Alternative(reason=reason, confidence=round(CEILING * share, 3), decided_by=name)
        for reason, share in finding.others
        if reason != "Unknown"
    ]
    if diagnosis.reason != "Unknown":
        rule = diagnosis.decided_by[0] if diagnosis.decided_by else ""
        others.append(
            Alternative(reason=diagnosis.reason, confidence=diagnosis.confidence, decided_by=rule)
        )
    kept = [one for one in (*others, *diagnosis.alternatives) if one.reason != finding.reason]
    return replace(
        diagnosis,
        outcome="stopped" if diagnosis.outcome == "stopped" else "failed",
        reason=finding.reason,
        category=finding.category,
        root_line=lines[0],
        root_lines=lines,
        evidence=_evidence(diagnosis, lines),
        scope=_scope(finding.roots[0]),
        action=finding.action,
        restart_helps=checks.HELPS[finding.action],
        mitigation=f"A model suggests, unproven: {finding.cause} {finding.mitigation}",
        confidence=sure,
        alternatives=_ranked(*kept),
        decided_by=(name,),
        root_text=checks.cleaned(finding.roots[0]).text.strip(),
    )


def _ranked(*alternatives: Alternative) -> tuple[Alternative, ...]:
    ranked = sorted(alternatives, key=lambda one: -one.confidence)
    once = {one.reason: one for one in reversed(ranked)}
    return tuple(one for one in ranked if once[one.reason] is one)[:_ALTERNATIVES]


def _evidence(diagnosis: Diagnosis, lines: tuple[LogLine, ...]) -> tuple[Evidence, ...]:
    places = {(one.file, one.line) for one in lines}
    roots = [Evidence(file=one.file, line=one.line, text=one.text, role="root") for one in lines]
    rest = [
        replace(one, role="cascade") if one.role == "root" else one
        for one in diagnosis.evidence
        if (one.file, one.line) not in places
    ]
    return (*roots, *rest)


def _scope(root: Kept) -> dict[str, Any]:
    """Return the location in the prefix of the root's line; locations from the model are ignored."""
    line = checks.cleaned(root)
    known = {"rank": line.rank, "local_rank": line.local_rank, "node": line.host}
    return {name: value for name, value in known.items() if value is not None}


def _proposed(finding: Finding, endpoint: Endpoint, rules: RuleSet) -> Mapping[str, Any] | None:
    if finding.rule is None:
        return None
    return proposed_rule(
        finding.rule,
        finding.roots[0],
        reason=finding.reason,
        category=finding.category,
        action=finding.action,
        mitigation=finding.mitigation,
        model=endpoint.model,
        rules=rules,
    )
