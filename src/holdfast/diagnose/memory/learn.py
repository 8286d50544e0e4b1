"""Learn rules from judged incidents: the most general patterns that change no correct answer.

For each reason, candidate patterns are made from the root lines of its incidents (`candidates`).
Candidates that match more root lines are tried first; of equal ones, the more general. The first
candidate that passes the `gate` becomes a rule, and the lines that it matches need no other rule.
So from one incident follows a rule that is as general as all other knowledge allows, and from
several incidents a rule for the words that they have in common.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import re2

from holdfast.diagnose.memory.candidates import (
    CLASS,
    OWN,
    PACKAGE,
    TEMPLATE,
    RuleCandidate,
    candidates,
    is_bare,
)
from holdfast.diagnose.memory.case import Case
from holdfast.diagnose.memory.gate import Gate
from holdfast.diagnose.memory.profile import profile_of
from holdfast.diagnose.memory.topics import BARE_ORDER, LAST_ORDER, Learned
from holdfast.diagnose.memory.words import mask
from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.rules import ROUTINE, Rule, RuleSet

_TRIES_LIMIT: Final = 10
"""The number of candidates per facet of a root line that are tried. Further, more specific ones
would match little else than the line itself."""
_EXAMPLES_LIMIT: Final = 5
_SURE_ALONE: Final = 0.3
"""The cost, in nats, that such a line is the root, if a person named the line as the root although
the rules chose another line.
"""
_BARE: Final = 0.2
"""This cost is added for a pattern that is only a class, and subtracted for a pattern with words,
whose lines are more likely roots."""
_LAST_RESORT: Final = 2.0
"""This cost is added for a class that would otherwise become the root in incidents with another
root.
"""
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
    """Learn rules from `cases`.

    Each new rule is checked against all cases, the good runs and the examples of the rules.

    Args:
        cases: the judged incidents.
        rules: the packaged rules and the user's own.
        good: lines of runs that ended well.
        learned: the learned rules that are already in force.
        withdrawn: the ids of learned rules that a person withdrew, and which are not learned again.
    """
    every = list(cases)
    gate = Gate(rules, every, good, learned)
    taken_back = frozenset(withdrawn)
    found: list[Learned] = []
    wrong = [
        case
        for case in every
        if case.reason != "Unknown" and not (_is_distinct(case, gate.rules) and gate.is_right(case))
    ]
    reasons = sorted({case.reason for case in wrong})
    # Patterns that are only a class are tried last. Such a pattern matches all lines of the class,
    # so patterns with more specific words must be learned before.
    for facets in (_FACETS[:-1], _FACETS[-1:]):
        for reason in reasons:
            found += _learn_reason(
                [case for case in wrong if case.reason == reason], gate, facets, taken_back
            )
    return found


@dataclass(frozen=True)
class _Line:
    case: Case
    text: str
    first: bool
    """True for the most certain root line of the case."""


def _is_distinct(case: Case, rules: RuleSet) -> bool:
    """Return True if a rule gives the most certain root line the reason of the case."""
    return bool(case.roots) and _says(_Line(case, case.roots[0], first=True), rules)


def _says(line: _Line, rules: RuleSet) -> bool:
    found = rules.find(line.text, "library_exception")
    return found is not None and found[0].reason == line.case.reason and found[0].kind != ROUTINE


def _learn_reason(
    cases: Sequence[Case], gate: Gate, facets: Sequence["Facet"], withdrawn: frozenset[str]
) -> list[Learned]:
    lines = [_Line(case, root, at == 0) for case in cases for at, root in enumerate(case.roots)]
    proposed: dict[str, RuleCandidate] = {}
    for line in lines:
        for one in candidates(line.text, line.case.reason):
            proposed.setdefault(one.pattern, one)
    matched_lines = {
        pattern: [line for line in lines if re2.search(pattern, line.text)] for pattern in proposed
    }
    named_by_class = {
        line
        for pattern, known in matched_lines.items()
        if proposed[pattern].breadth <= OWN
        for line in known
    }
    accepted: list[Learned] = []
    for facet in facets:
        beside = gate.rules if facet is _anything else None
        open_ = [
            line
            for line in lines
            if beside is None or not (line in named_by_class or _says(line, beside))
        ]
        taught: set[tuple[_Line, int]] = set()
        tries = _TRIES_LIMIT * len(open_)
        fitting = [
            one
            for one in proposed.values()
            if any(facet(one, line) for line in matched_lines[one.pattern])
        ]
        for one in sorted(
            fitting, key=lambda each: _rank(each, matched_lines[each.pattern], lines)
        ):
            known = [
                line for line in matched_lines[one.pattern] if line in open_ and facet(one, line)
            ]
            known = [line for line in known if (line, one.part) not in taught]
            if len({mask(line.text) for line in known}) < 1 + one.only_shared:
                continue
            tries -= 1
            if tries < 0:
                break
            made = _tried(one, known, gate, withdrawn)
            if made is not None:
                gate.accept(made)
                accepted.append(made)
                taught |= {(line, one.part) for line in known}
                if facet is not _named_words:
                    open_ = [line for line in open_ if line not in known]
    return accepted


# From a line, up to three patterns are learned: its class, words that name its reason, and any of
# its words. Similar lines may have one of these without the others. From less certain root lines,
# only words that name the reason are learned, and only if their class does not mean another reason.


def _class(one: RuleCandidate, line: _Line) -> bool:
    return OWN < one.breadth <= CLASS and (line.first or one.breadth == PACKAGE)


def _named_words(one: RuleCandidate, _: _Line) -> bool:
    return one.named and CLASS < one.breadth < TEMPLATE


def _anything(one: RuleCandidate, line: _Line) -> bool:
    return one.breadth > CLASS and (line.first or one.named or is_bare(line.text))


def _family(one: RuleCandidate, _: _Line) -> bool:
    return one.breadth <= OWN


Facet = Callable[[RuleCandidate, _Line], bool]
_FACETS: Final[tuple[Facet, ...]] = (_class, _named_words, _anything, _family)


def _rank(one: RuleCandidate, lines: Sequence[_Line], every: Sequence[_Line]) -> tuple[float, ...]:
    cases = len({line.case.key for line in lines})
    first = min((at for at, line in enumerate(every) if line in lines), default=0)
    return (-cases, one.breadth, -one.worth, first)


def _tried(
    one: RuleCandidate, lines: Sequence[_Line], gate: Gate, withdrawn: frozenset[str]
) -> Learned | None:
    made = _rule(one, lines, gate.rules)
    if made.rule.id in withdrawn or gate.has(made.rule.id):
        return None
    source = next((line.case for line in lines if line.first), None)
    foreign = gate.foreign(made)
    made = replace(made, foreign=foreign)
    if not gate.refusal(made, source, named=one.named):
        return made
    if source is not None:
        # Although a rule matches the line, another line with a lower cost may be chosen as the
        # root. But a person decided that this line is the root.
        sure = replace(made, rule=replace(made.rule, alone=_SURE_ALONE))
        if not gate.refusal(sure, source, named=one.named):
            return sure
    if not one.named:
        return None
    # The diagnosis of the incident itself may stay wrong, because a more precise rule matches its
    # line, or because the log shows that the job survived the line. It is still worthwhile to learn
    # the words that name the reason.
    late = replace(made, order=max(made.order, BARE_ORDER))
    if one.breadth > OWN:
        return late if not gate.refusal(late, named=True) else None
    # It is worthwhile to learn a class, for logs with no other evidence.
    last = replace(late, rule=replace(late.rule, alone=(late.rule.alone or 0.0) + _LAST_RESORT))
    return next((each for each in (late, last) if not gate.refusal(each, named=True)), None)


def _rule(one: RuleCandidate, lines: Sequence[_Line], rules: RuleSet) -> Learned:
    roots = list(dict.fromkeys(line.text for line in lines))
    cases = {line.case.key: line.case for line in lines}
    reason = lines[0].case.reason
    found = rules.find(roots[0], "library_exception")
    before = found[0] if found is not None else None
    action = next((case.action for case in cases.values() if case.action), "")
    profile = profile_of(reason, roots, before, rules.rules, action)
    order = LAST_ORDER if one.breadth <= OWN else BARE_ORDER
    if before is not None:
        order = min(order, next(topic.order for topic in rules.topics if before in topic.rules))
    noun = "incident" if len(cases) == 1 else "incidents"
    return Learned(
        rule=Rule(
            id=rule_id(reason, one.pattern),
            pattern=one.pattern,
            kind=profile.kind,
            reason=reason,
            action=profile.action,
            restart_helps=profile.restart_helps,
            alone=kinds()[profile.kind].alone + (_BARE if one.breadth <= OWN else -_BARE),
            mitigation=f"It looks like {noun} {', '.join(cases)}, which was {reason}: {mask(roots[0])[:200]}",
            # The rule of succession: if all n cases were correct, the expected share is (n + 1) /
            # (n + 2).
            confidence=round((len(cases) + 1) / (len(cases) + 2), 2),
            source=f"learned from {noun} {', '.join(cases)}",
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
    """Return the id of a learned rule, which depends only on the pattern and the reason."""
    return f"learned-{reason.lower()}-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
