"""Rules that a model suggested with its finding: kept beside the incident, and tried when a person judges it.

A suggestion is in force only after it passed the same gate as what is learned here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

import re2

from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import LearnedRule
from holdfast.diagnose.memory.candidates import PHRASE
from holdfast.diagnose.memory.case import Case
from holdfast.diagnose.memory.gate import Gate
from holdfast.diagnose.memory.topics import BARE_ORDER, Learned
from holdfast.diagnose.memory.words import tokens
from holdfast.diagnose.rules.rules import Rule
from holdfast.diagnose.rules.taxonomy import CATEGORIES

KIND: Final = "suggestion"
AUTHOR: Final = "model"
_HOT_LETTERS: Final = 4
_RULE_FIELDS: Final = tuple(field.name for field in fields(Rule))


def keep_suggestion(ledger: Ledger, key: str, rule: Mapping[str, Any], *, now_s: float) -> None:
    """Record the fields of a `Rule` that a model suggested for incident `key`.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    record = LearnedRule(
        rule_id=str(rule["id"]),
        kind=KIND,
        body=dict(rule),
        author=AUTHOR,
        sources=[key],
        made_at_s=now_s,
    )
    ledger.add_learned_rule(record)


def accepted_suggestions(
    suggested: Iterable[LearnedRule], cases: Iterable[Case], gate: Gate
) -> list[Learned]:
    """Those whose incident a person found to have their reason and that `gate` lets pass, and from then on has."""
    by_key = {case.key: case for case in cases}
    found = []
    for record in suggested:
        case = by_key.get(record.sources[0])
        if case is None or case.reason != record.body["reason"]:
            continue
        made = _learned(record)
        if made is not None and not gate.refusal(made, case):
            gate.accept(made)
            found.append(made)
    return found


def _learned(record: LearnedRule) -> Learned | None:
    given = {name: record.body[name] for name in _RULE_FIELDS if name in record.body}
    category = given.get("category", CATEGORIES[given["reason"]])
    examples = {name: tuple(given[name]) for name in ("match", "no_match")}
    rule = Rule(**{**given, **examples, "category": category})
    hot = _hot(rule)
    if hot is None:
        return None
    what = f"lines that fit a pattern which a model suggested: {rule.pattern}"
    sources = tuple(record.sources)
    return Learned(
        rule=rule, order=BARE_ORDER, breadth=PHRASE, hot=(hot,), sources=sources, what=what
    )


def _hot(rule: Rule) -> str | None:
    """The longest word without which the pattern would not find its own example; None where there is none."""
    pattern, example = re2.compile(rule.pattern), rule.match[0]
    words = {
        one.text for one in tokens(example) if one.sort == "word" and len(one.text) >= _HOT_LETTERS
    }
    for word in sorted(words, key=lambda one: (-len(one), one)):
        if not pattern.search(example.replace(word, "")):
            return word.lower()
    return None
