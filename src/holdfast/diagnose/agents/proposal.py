"""Turn a model's rule idea into plain data: a suggestion that the memory's gate accepts or not.

The model supplies the pattern and the counter-examples; the diagnosis supplies the rest. The
pattern has been compiled, matches the root's line, and matches no example of routine output or of
rules with another reason.
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
_LITERAL_LEAST: Final = 8
"""The least letters and digits that a pattern spells out; fewer do not identify a wording."""
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
    """Return the pattern in RE2; None if invalid, too large, or matching the empty line."""
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
    return sum(one.isalnum() for one in literal) >= _LITERAL_LEAST


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
    """Return the fields of a `Rule` with redacted examples, or None if the idea fails a check.

    The kind is the most frequent kind of rules with this reason, since the possible effects of a
    kind are not for a model to decide.
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
