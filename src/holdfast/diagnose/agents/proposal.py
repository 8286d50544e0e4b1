"""Turn a model's idea for a rule into a suggestion, which `memory.gate` accepts or refuses.

The model supplies the pattern and the counter-examples; the diagnosis supplies the other fields. An
idea becomes a suggestion only if the pattern compiles, matches the root's line, and matches no
example of routine output or of rules with another reason.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import re2

from holdfast.diagnose.agents.checks import HELPS, cleaned
from holdfast.diagnose.agents.redact import redact
from holdfast.diagnose.explain.compress import Kept
from holdfast.diagnose.logs.filters import packaged_filters
from holdfast.diagnose.rules.rules import ROUTINE, RuleSet
from holdfast.diagnose.rules.taxonomy import Action, Category

PATTERN_CHARACTERS: Final = 300
_PATTERN_MEMORY_BYTES: Final = 1 << 20
_MIN_LITERALS: Final = 8
"""The least number of literal letters and digits in a pattern; with fewer, the pattern does not
identify a particular message.
"""
_CONFIDENCE: Final = 0.5
_CLASSES: Final = re2.compile(
    r"\\[pP]\{\^?\w+\}|\\.|\[[^\]]*\]|\{[^}]*\}|\(\?[a-zA-Z-]*[:)]|\(\?P?<\w+>"
)


@dataclass(frozen=True, kw_only=True)
class RuleIdea:
    """A model's idea for a rule."""

    pattern: str
    match: tuple[str, ...]
    no_match: tuple[str, ...]


def compiled(pattern: str) -> Any:
    """Compile `pattern` with RE2; return None if it is invalid, too large, or matches an empty line."""
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_MEMORY_BYTES, False
    try:
        made = re2.compile(pattern, options)
    except re2.error:
        return None
    return None if made.search("") or len(pattern) > PATTERN_CHARACTERS else made


def spells_out(pattern: str) -> bool:
    """Return True if the pattern has enough literal letters and digits."""
    literal: str = _CLASSES.sub("", pattern)
    return sum(one.isalnum() for one in literal) >= _MIN_LITERALS


def proposed_rule(
    idea: RuleIdea,
    root: Kept,
    *,
    reason: str,
    category: Category,
    action: Action,
    mitigation: str,
    model: str,
    rules: RuleSet,
) -> Mapping[str, Any] | None:
    """Return the fields of a `Rule`, with redacted examples; None if the idea fails a check.

    The kind of the rule is the most frequent kind of the existing rules with this reason. The model
    cannot choose the kind, since the kind determines which effects an event can have.
    """
    pattern = compiled(idea.pattern)
    text = cleaned(root).text.strip()
    example = redact(text)
    if pattern is None or not spells_out(idea.pattern) or pattern.groupindex:
        return None
    if (
        not pattern.search(text)
        or not pattern.search(example)
        or any(map(pattern.search, idea.no_match))
    ):
        return None
    harmless = [line for one in packaged_filters() for line in one.match]
    others = [
        line
        for rule in rules.rules
        if rule.kind == ROUTINE or rule.reason != reason
        for line in rule.match
    ]
    if any(map(pattern.search, harmless + others)):
        return None
    kinds = Counter(
        rule.kind for rule in rules.rules if rule.reason == reason and rule.kind != ROUTINE
    )
    given: dict[str, Any] = {
        "id": f"model-{hashlib.sha256(idea.pattern.encode()).hexdigest()[:12]}",
        "pattern": idea.pattern,
        "kind": kinds.most_common(1)[0][0] if kinds else "suspect",
        "reason": reason,
        "action": action,
        "restart_helps": HELPS[action],
        "mitigation": mitigation,
        "confidence": _CONFIDENCE,
        "source": f"proposed by the model {model}; to be accepted by the gate only",
        "match": [example],
        "no_match": [redact(line) for line in idea.no_match],
    }
    return given | ({"category": category} if reason == "Others" else {})
