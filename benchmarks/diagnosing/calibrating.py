"""Measure the two numbers of `holdfast.diagnose.explain.confidence` on the foreign noise.

Each failure is answered twice: with all rules, and without the rule that decided. The second answer
stands for failures of an unknown kind; `LEFT_OUT` is their number for each known one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from diagnosing.cases import Case

LEFT_OUT: Final = 0.1
RIDGE: Final = 0.01
"""The regularisation, which keeps the fit finite if answers are separable without an error."""
_ROUNDS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer."""

    support: Any
    """`holdfast.diagnose.explain.confidence.Support`"""
    right: bool
    weight: float = 1.0


def samples(cases: Iterable[Case]) -> Iterator[Sample]:
    """Yield both answers about each case, except answers with a limit of their own."""
    from holdfast.diagnose import packaged_rules

    rules = packaged_rules()
    for case in cases:
        found = _answered(case, rules)
        if found is None:
            continue
        left_out = _answered(case, _without(rules, found[1]))
        for one, weight in ((found[0], 1.0), (left_out and left_out[0], LEFT_OUT)):
            if one is not None and one.support.most == 1.0:
                yield replace(one, weight=weight)


def _answered(case: Case, rules: Any) -> tuple[Sample, str] | None:
    """Return the answer by `rules`, and the id of the deciding rule; None without a failure."""
    from holdfast.diagnose.explain.confidence import support_of
    from holdfast.diagnose.explain.explain import explain, first_end
    from holdfast.diagnose.explain.outcome import decide_end
    from holdfast.diagnose.explain.scan import scan
    from holdfast.diagnose.logs.files import find_files

    events = scan(find_files([case.path]).files, rules)
    end = decide_end(events)
    if not end.has_cause:
        return None
    events = [one for one in events if id(one) not in end.survived]
    explanation = explain(events, first_end(events))
    if not explanation.ranked:
        return None
    rule = explanation.ranked[0].first.rule
    return Sample(support=support_of(explanation), right=rule.reason in case.accepted), rule.id


def _without(rules: Any, rule_id: str) -> Any:
    from holdfast.diagnose.rules.rules import RuleSet

    topics = [
        replace(topic, rules=tuple(rule for rule in topic.rules if rule.id != rule_id))
        for topic in rules.topics
    ]
    return RuleSet(topic for topic in topics if topic.rules)


def fit(measured: Sequence[Sample]) -> tuple[float, float]:
    """Return the offset and the rule's weight that make `measured` likeliest.

    The fit is a logistic regression by Newton's method; the margin's weight stays as it is. Source:
    Platt, "Probabilistic Outputs for Support Vector Machines", 1999.
    """
    from holdfast.diagnose.explain.confidence import OF_MARGIN, log_odds

    offset, of_rule = 0.0, 1.0
    for _ in range(_ROUNDS):
        pull = [-RIDGE * offset, -RIDGE * of_rule]
        bend = [RIDGE, 0.0, RIDGE]
        for one in measured:
            rule = log_odds(one.support.rule)
            odds = offset + of_rule * rule + OF_MARGIN * one.support.margin
            share = 1 / (1 + math.exp(-odds))
            short, spread = one.weight * (one.right - share), one.weight * share * (1 - share)
            pull = [pull[0] + short, pull[1] + short * rule]
            bend = [bend[0] + spread, bend[1] + spread * rule, bend[2] + spread * rule * rule]
        size = bend[0] * bend[2] - bend[1] ** 2
        offset += (bend[2] * pull[0] - bend[1] * pull[1]) / size
        of_rule += (bend[0] * pull[1] - bend[1] * pull[0]) / size
    return offset, of_rule


def share_right(measured: Sequence[Sample]) -> float:
    """Return the share of right answers, by weight."""
    return sum(one.weight * one.right for one in measured) / sum(one.weight for one in measured)
