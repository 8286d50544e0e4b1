"""Refuse a new rule that would change a correct answer.

The answers for stored incidents, good runs and the examples of other rules are checked.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2

from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.memory.case import Case
from holdfast.diagnose.memory.topics import Layered, Learned, LearnedTopic, shielded
from holdfast.diagnose.rules.rules import ROUTINE, Rule, RuleSet

FOREIGN_LIMIT: Final = 2
"""A new pattern may match at most this number of examples of rules for other reasons, if it has no
word on the subject of its reason. All of these examples must be decided by rules that come earlier.
"""


@dataclass(frozen=True, slots=True)
class _Example:
    text: str
    rule: Rule
    order: int
    """The order of the topic whose rule decides the example."""


class Gate:
    """Check that all correct answers remain correct if a new rule is added."""

    def __init__(
        self,
        rules: RuleSet,
        cases: Iterable[Case],
        good: Iterable[str] = (),
        learned: Iterable[Learned] = (),
    ) -> None:
        """Store the knowledge that new rules are checked against.

        Args:
            rules: the packaged rules and the user's own.
            cases: the judged incidents.
            good: lines of runs that ended well, without their prefixes.
            learned: the learned rules that are in force, in addition to `rules`.
        """
        plain = [topic for topic in rules.topics if not isinstance(topic, LearnedTopic)]
        self._below = rules if len(plain) == len(rules.topics) else RuleSet(plain)
        self._accepted = tuple(learned)
        self._rules: RuleSet = Layered(self._below, self._accepted)
        self.cases = tuple(cases)
        self.good = tuple(good)
        self._examples = _examples(self._below)
        self._right: dict[str, bool] = {}

    def accept(self, learned: Learned) -> None:
        """Put the rule `learned` in force."""
        self._accepted = (*self._accepted, learned)
        self._rules = Layered(self._below, self._accepted)
        self._right.clear()

    def has(self, rule_id: str) -> bool:
        """Return True if a learned rule with this id is in force."""
        return any(one.rule.id == rule_id for one in self._accepted)

    @property
    def rules(self) -> RuleSet:
        """All rules in force."""
        return self._rules

    def is_right(self, case: Case) -> bool:
        """Return True if the rules in force answer `case` correctly."""
        if case.key not in self._right:
            self._right[case.key] = (
                bool(case.lines) and case.replay(self._rules).reason == case.reason
            )
        return self._right[case.key]

    def refusal(self, learned: Learned, source: Case | None = None, *, named: bool = False) -> str:
        """Return a phrase that states why the rule is refused; an empty text if it is accepted.

        Args:
            learned: the new rule.
            source: the incident that the rule was learned from.
            named: True if the pattern has a word on the subject of the reason.
        """
        pattern = re2.compile(learned.rule.pattern)
        if spoiled := self._spoiled_example(learned, pattern, named):
            return spoiled
        if met := next(
            (
                line
                for line in self.good
                if pattern.search(line) and not shielded(learned.rule, line)
            ),
            None,
        ):
            return f"a good run printed {met!r:.120}"
        touched = [
            case for case in self.cases if any(pattern.search(text.lstrip()) for text in case.texts)
        ]
        if not touched:
            return ""
        tried = Layered(self._below, (*self._accepted, learned))
        for case in touched:
            own = source is not None and case.key == source.key
            if (own or self.is_right(case)) and case.lines:
                result = case.replay(tried)
                if result.reason != case.reason:
                    return f"incident {case.key} would be {result.reason}, and is {case.reason}"
        return ""

    def foreign(self, learned: Learned) -> int:
        """Return how many examples of rules for other reasons the pattern matches."""
        return len(self._foreign(learned, re2.compile(learned.rule.pattern)))

    def _spoiled_example(self, learned: Learned, pattern: Any, named: bool) -> str:
        foreign = self._foreign(learned, pattern)
        for example in foreign:
            if example.order >= learned.order:
                return f"rule {example.rule.id} matches {example.text!r:.120}"
        if len(foreign) > FOREIGN_LIMIT and not named:
            return f"rules for other reasons match such lines: {foreign[0].text!r:.120}"
        return ""

    def _foreign(self, learned: Learned, pattern: Any) -> list[_Example]:
        return [
            one
            for one in self._examples
            if (one.rule.kind == ROUTINE or one.rule.reason not in (learned.rule.reason, "Unknown"))
            and pattern.search(one.text)
            and not shielded(learned.rule, one.text)
        ]


@functools.lru_cache(maxsize=4)
def _examples(rules: RuleSet) -> Sequence[_Example]:
    """Return the examples of all rules, each with the rule that decides it."""
    place = {rule.id: topic.order for topic in rules.topics for rule in topic.rules}
    found = []
    for rule in rules.rules:
        for line in rule.match:
            text = clean_line(line.encode(), 1).text
            decided = rules.find(text, rule.where)
            if decided is not None:
                found.append(_Example(text, decided[0], place[decided[0].id]))
    return found
