"""Confirmed incidents to rules: the most general pattern that leaves right what was right.

For each reason the root lines of its incidents give candidates (`candidates`). Those are tried first that know the
most of the root lines, then the most general; the first that passes the `gate` is accepted, and the lines that it knows
are done. So one incident gives a rule as wide as everything else that is known allows, and several give what they have
in common.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import re2

from holdfast.diagnose.memory.candidates import Candidate, candidates
from holdfast.diagnose.memory.case import Case
from holdfast.diagnose.memory.gate import Gate
from holdfast.diagnose.memory.profile import profile_of
from holdfast.diagnose.memory.topics import LATE_ORDER, Learned, with_learned
from holdfast.diagnose.memory.words import mask
from holdfast.diagnose.rules import ROUTINE, Rule, RuleSet

_TRIES_LIMIT: Final = 24
"""Candidates that are tried for one root line."""
_EXAMPLES_LIMIT: Final = 5
_SURE_ALONE: Final = 0.3
"""Cost of being the root, for a line that a person named and that lost to another."""
_NO_MATCH: Final = "step 100/1000 loss 2.31"
AUTHOR: Final = "learned"


def learn(
    cases: Iterable[Case],
    rules: RuleSet,
    good: Iterable[str] = (),
    *,
    learned: Iterable[Learned] = (),
    withdrawn: Iterable[str] = (),
) -> list[Learned]:
    """The rules that `cases` teach beside `rules`, each checked against all cases, good runs and the rules' examples.

    `good`: lines of runs that ended well; `learned`: rules that were learned before and are in force; `withdrawn`: ids
    of learned rules that a person took back, which are not proposed again.
    """
    every = list(cases)
    gate = Gate(with_learned(rules.topics, learned), every, good)
    taken_back = frozenset(withdrawn)
    found: list[Learned] = []
    wrong = [
        case for case in every if case.reason != "Unknown" and not (_is_told(case, gate.rules) and gate.is_right(case))
    ]
    for reason in sorted({case.reason for case in wrong}):
        found += _learn_reason([case for case in wrong if case.reason == reason], gate, taken_back)
    return found


@dataclass(frozen=True)
class _Line:
    case: Case
    text: str
    first: bool
    """The case's surest root."""


def _is_told(case: Case, rules: RuleSet) -> bool:
    """Whether a rule says the reason of the surest root line."""
    found = rules.find(case.roots[0], "library_exception") if case.roots else None
    return found is not None and found[0].reason == case.reason and found[0].kind != ROUTINE


def _learn_reason(cases: Sequence[Case], gate: Gate, withdrawn: frozenset[str]) -> list[Learned]:
    open_ = [_Line(case, root, at == 0) for case in cases for at, root in enumerate(case.roots)]
    proposed: dict[str, Candidate] = {}
    for line in open_:
        for one in candidates(line.text, line.case.reason):
            proposed.setdefault(one.pattern, one)
    knows = {pattern: [line for line in open_ if re2.search(pattern, line.text)] for pattern in proposed}
    accepted: list[Learned] = []
    refused: set[str] = set()
    while open_:
        left = set(open_)
        ranked = sorted(
            (one for one in proposed.values() if one.pattern not in refused and left & set(knows[one.pattern])),
            key=lambda one: _rank(one, [line for line in knows[one.pattern] if line in left], open_),
        )
        made = None
        for one in ranked[: _TRIES_LIMIT * len(left)]:
            lines = [line for line in knows[one.pattern] if line in left]
            made = _tried(one, lines, gate, withdrawn)
            if made is not None:
                break
            refused.add(one.pattern)
        if made is None:
            break
        gate.accept(made)
        accepted.append(made)
        known = re2.compile(made.rule.pattern)
        open_ = [line for line in open_ if not known.search(line.text)]
    return accepted


def _rank(one: Candidate, lines: Sequence[_Line], every: Sequence[_Line]) -> tuple[float, ...]:
    cases = len({line.case.key for line in lines})
    surest = any(line.first for line in lines)
    first = next(at for at, line in enumerate(every) if line in lines)
    return (not surest, -cases, one.breadth, -one.worth, first)


def _tried(one: Candidate, lines: Sequence[_Line], gate: Gate, withdrawn: frozenset[str]) -> Learned | None:
    made = _rule(one, lines, gate.rules)
    if made.rule.id in withdrawn:
        return None
    source = next((line.case for line in lines if line.first), None)
    if not gate.refusal(made, source):
        return made
    if source is not None:
        # Its line may be known and yet lose to another that weighs less: a person says that this is the root.
        sure = replace(made, rule=replace(made.rule, alone=_SURE_ALONE))
        if not gate.refusal(sure, source):
            return sure
    return None


def _rule(one: Candidate, lines: Sequence[_Line], rules: RuleSet) -> Learned:
    roots = list(dict.fromkeys(line.text for line in lines))
    cases = {line.case.key: line.case for line in lines}
    reason = lines[0].case.reason
    found = rules.find(roots[0], "library_exception")
    before = found[0] if found is not None else None
    action = next((case.action for case in cases.values() if case.action), "")
    profile = profile_of(reason, roots, before, rules.rules, action)
    order = LATE_ORDER
    if before is not None:
        order = min(order, next(topic.order for topic in rules.topics if before in topic.rules))
    said = "incident" if len(cases) == 1 else "incidents"
    return Learned(
        rule=Rule(
            id=rule_id(reason, one.pattern),
            pattern=one.pattern,
            kind=profile.kind,
            reason=reason,
            action=profile.action,
            restart_helps=profile.restart_helps,
            mitigation=f"It looks like {said} {', '.join(cases)}, which was {reason}: {mask(roots[0])[:200]}",
            # The rule of succession: after n cases of n, (n + 1) / (n + 2).
            confidence=round((len(cases) + 1) / (len(cases) + 2), 2),
            source=f"learned from {said} {', '.join(cases)}",
            match=tuple(roots[:_EXAMPLES_LIMIT]),
            no_match=(_NO_MATCH,),
            category=profile.category,
        ),
        order=order,
        breadth=one.breadth,
        hot=one.hot,
        sources=tuple(cases),
        what=one.what,
    )


def rule_id(reason: str, pattern: str) -> str:
    """The id of a learned rule: the same for the same pattern and reason."""
    return f"learned-{reason.lower()}-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
