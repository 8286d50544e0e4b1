"""Place learned rules among the others, and protect routine lines from them.

A learned rule comes just before the topic that decided its line otherwise, so that more precise
rules are tried first. A rule with words comes at the latest before Python's bare classes, since the
same words may follow a class elsewhere. Within a topic the most specific rule comes first. Lines
that only resemble errors (the first rules of `suspect.yaml`) are hidden from learned rules, unless
a rule was learned from such a line.
"""

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import re2

from holdfast.diagnose.rules.packaged import packaged_topics
from holdfast.diagnose.rules.rules import ROUTINE, Rule, RuleSet, Topic, Where

BARE_ORDER: Final = 90
"""The order of `python.yaml`, Python's bare classes. A learned topic of this order comes before it,
by its name."""
LAST_ORDER: Final = 1000
"""The order of `suspect.yaml`, the last topic."""
SUSPECT: Final = "suspect.yaml"
_NAME: Final = "+learned"
"""Sorts before the name of any file."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned rule and its place."""

    rule: Rule
    order: int
    """The rule comes before the topics of this order."""
    breadth: int
    """From 0, the most general, to 9, a line itself."""
    hot: tuple[str, ...]
    sources: tuple[str, ...]
    """Keys of the incidents that the rule was learned from."""
    foreign: int = 0
    """The number of examples of rules for other reasons that the rule would match if tried first.
    """
    what: str = ""
    """A description of the matched lines, for people."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the ledger."""
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
        """Return the rule that `to_json` wrote."""
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
    """A topic that skips lines that only resemble errors."""

    def find(self, text: str, where: Where) -> Rule | None:
        """Return the first rule that matches, as `Topic.find`."""
        found = super().find(text, where)
        return None if found is None or (where == "line" and shielded(found, text)) else found


def shielded(rule: Rule, text: str) -> bool:
    """Return True if a learned `rule` skips `text`, which only resembles an error."""
    return sounds_bad(text) and not any(sounds_bad(example) for example in rule.match)


@functools.lru_cache(maxsize=4096)
def sounds_bad(text: str) -> bool:
    """Return True if `text` only resembles an error: a counter, a setting, a line of a program."""
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
    """Return the topics of learned rules, one per order."""
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
    """Learned rules above other rules; cheap to build, so that each new rule can be tested."""

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
        """Return the first rule that matches with its captures, as `RuleSet.find`."""
        found = self._below.find(text, where)
        order = LAST_ORDER if found is None else self._order[found[0].id]
        for topic in self._above:
            if topic.order <= order and (rule := topic.find(text, where)) is not None:
                return rule, {}
        return found

    def digits_matter(self, text: str) -> bool:
        """Return True if another number could change the meaning, as `RuleSet.digits_matter`."""
        return self._below.digits_matter(text) or any(
            topic.digits_matter(text) for topic in self._above
        )
