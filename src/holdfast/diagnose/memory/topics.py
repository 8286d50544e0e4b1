"""Place learned rules among the other rules, and protect routine lines from learned rules.

A learned rule comes directly before the topic that would otherwise decide its line, so that more
precise rules are still tried first. A rule with words comes at the latest before the topic of
Python's built-in classes, since the same words may follow a class in other logs. Within a topic,
the most specific rule comes first. Some lines only look like errors (the first rules of
`suspect.yaml`). Learned rules skip these lines, except rules that were learned from such a line.
"""

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import re2

from holdfast.diagnose.rules.packaged import packaged_topics
from holdfast.diagnose.rules.rules import ROUTINE, Rule, RuleSet, Topic, Where

BARE_ORDER: Final = 90
"""The order of `python.yaml`, the topic of Python's built-in classes. A learned topic of the same
order comes before it, because its name sorts before."""
LAST_ORDER: Final = 1000
"""The order of `suspect.yaml`, the last topic."""
SUSPECT: Final = "suspect.yaml"
_NAME: Final = "+learned"
"""A name that sorts before the name of any topic file."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned rule, and its place among the other rules."""

    rule: Rule
    order: int
    """The rule comes directly before the topics of this order."""
    breadth: int
    """The specificity of the rule: from 0, the most general, to 9, a single line."""
    hot: tuple[str, ...]
    sources: tuple[str, ...]
    """The keys of the incidents from which the rule was learned."""
    foreign: int = 0
    """The number of examples of rules for other reasons that the rule would match, if it came
    first.
    """
    what: str = ""
    """A description, for people, of the lines that match."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, which the ledger can store."""
        return {
            **asdict(self.rule),
            "match": list(self.rule.match),
            "no_match": list(self.rule.no_match),
            "order": self.order,
            "breadth": self.breadth,
            "hot": list(self.hot),
            "foreign": self.foreign,
            "what": self.what,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any], sources: Iterable[str]) -> Self:
        """Convert plain values from `to_json` to a learned rule."""
        values = {name: body[name] for name in _RULE_FIELDS if name in body}
        values |= {"match": tuple(body["match"]), "no_match": tuple(body["no_match"])}
        return cls(
            rule=Rule(**values),
            order=int(body["order"]),
            breadth=int(body["breadth"]),
            hot=tuple(body["hot"]),
            sources=tuple(sources),
            foreign=int(body.get("foreign", 0)),
            what=body.get("what", ""),
        )


_RULE_FIELDS: Final = tuple(field.name for field in fields(Rule))


class LearnedTopic(Topic):
    """A topic of learned rules, which skip lines that only look like errors."""

    def find(self, text: str, where: Where) -> Rule | None:
        """Return the first rule that matches (see `Topic.find`)."""
        found = super().find(text, where)
        return None if found is None or (where == "line" and shielded(found, text)) else found


def shielded(rule: Rule, text: str) -> bool:
    """Return True if the learned rule `rule` must skip `text`, which only looks like an error."""
    return sounds_bad(text) and not any(sounds_bad(example) for example in rule.match)


@functools.lru_cache(maxsize=4096)
def sounds_bad(text: str) -> bool:
    """Return True if `text` only looks like an error, such as a counter, a setting or source code."""
    return bool(_shield().Match(text))


@functools.cache
def _shield() -> Any:
    made = re2.Set.SearchSet(re2.Options())
    for topic in packaged_topics():
        if topic.name == SUSPECT:
            for rule in topic.rules:
                if rule.kind == ROUTINE:
                    made.Add(rule.pattern)
    made.Compile()
    return made


def learned_topics(learned: Iterable[Learned]) -> tuple[Topic, ...]:
    """Group learned rules into topics, one topic per order."""
    by_order: dict[int, list[Learned]] = {}
    for one in learned:
        by_order.setdefault(one.order, []).append(one)
    return tuple(
        LearnedTopic(
            name=f"{_NAME}-{order}",
            order=order,
            hot=frozenset(word for one in group for word in one.hot),
            rules=tuple(one.rule for one in sorted(group, key=_special_first)),
        )
        for order, group in sorted(by_order.items())
    )


def _special_first(one: Learned) -> tuple[int, int, str]:
    return -one.breadth, one.foreign, one.rule.id


class Layered(RuleSet):
    """Learned rules combined with other rules, cheap to build so that each new rule can be tested."""

    def __init__(self, below: RuleSet, learned: Iterable[Learned]) -> None:
        above = learned_topics(learned)
        self.topics = (*below.topics, *above)
        self.rules = (*below.rules, *(rule for topic in above for rule in topic.rules))
        hot = "|".join(re2.escape(word) for topic in above for word in sorted(topic.hot))
        self.hot = re2.compile(
            b"(?:" + below.hot.pattern + b")" + (f"|(?i:{hot})".encode() if hot else b"")
        )
        self._below = below
        self._above = above
        self._order = {rule.id: topic.order for topic in below.topics for rule in topic.rules}

    def find(self, text: str, where: Where = "line") -> tuple[Rule, dict[str, str]] | None:
        """Return the first rule that matches, with its captures (see `RuleSet.find`)."""
        found = self._below.find(text, where)
        order = LAST_ORDER if found is None else self._order[found[0].id]
        for topic in self._above:
            if topic.order <= order and (rule := topic.find(text, where)) is not None:
                return rule, {}
        return found

    def digits_matter(self, text: str) -> bool:
        """Return True if another number could change the meaning (see `RuleSet.digits_matter`)."""
        return self._below.digits_matter(text) or any(
            topic.digits_matter(text) for topic in self._above
        )
