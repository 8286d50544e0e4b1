"""Rules: YAML files of patterns, checked when loaded, matched in linear time.

A topic file in `rules/` has `order` (its place; the first rule that matches a line decides what the line is),
`hot` (words of which each line that its rules match has one, in any case: the prefilter of a whole log),
`defaults` (for its rules) and `rules`. A rule has the fields of `Rule`.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any, Final, Literal, get_args

import re2
import yaml

from holdfast.core.errors import BadUse
from holdfast.diagnose.diagnosis import CATEGORIES, Action, Category

RuleRole = Literal["root", "cascade", "teardown", "ignore"]
Where = Literal["line", "user_exception", "library_exception"]
CAPTURES: Final = frozenset({"rank", "local_rank", "node", "gpu", "link", "pid"})
"""Named groups a pattern may have: the scope, and a process by which a rank can be found."""
_SET_MEMORY_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one kind of line means."""

    id: str
    pattern: str
    """RE2, searched in the line without its rank and time prefixes."""
    role: RuleRole
    """`root`: can be a cause. `cascade`: a root only where nothing better is found. `teardown`: never a root.
    `ignore`: not an error; shields the line from later rules."""
    depth: int
    """How near the origin of a failure such a line stands, 0 to 100: deeper ones explain shallower ones."""
    reason: str
    action: Action
    restart_helps: bool
    mitigation: str
    confidence: float
    source: str
    """Where the wording comes from."""
    match: tuple[str, ...]
    no_match: tuple[str, ...]
    category: Category = "Unknown"
    """Given only with the reason `Others`; else it follows from the reason."""
    where: Where = "line"
    """`user_exception` and `library_exception`: only the last line of a traceback whose deepest frame lies in
    the user's own code, or not."""
    first_death: bool = False
    """This rank died before all others, of what no peer can cause: other ranks' errors follow from it."""


class RuleSet:
    """Rules in their order, with the prefilter of their topics."""

    def __init__(self, rules: Iterable[Rule], hot_words: Iterable[str]) -> None:
        self.rules = tuple(rules)
        words = "|".join(sorted(re2.escape(word) for word in hot_words))
        self.hot = re2.compile(f"(?i)(?:{words})".encode())
        """Found in the bytes of every line that a rule for lines can match."""
        options = re2.Options()
        options.max_mem = _SET_MEMORY_BYTES
        self._set = re2.Set.SearchSet(options)
        for rule in self.rules:
            self._set.Add(rule.pattern)
        self._set.Compile()
        self._compiled = [re2.compile(rule.pattern) for rule in self.rules]

    def find(self, text: str, where: Where = "line") -> tuple[Rule, dict[str, str]] | None:
        """The first rule that matches `text`, with its captures; rules for plain lines fit every `where`."""
        for index in sorted(self._set.Match(text) or ()):
            rule = self.rules[index]
            if rule.where in ("line", where):
                match = self._compiled[index].search(text)
                named = self._compiled[index].groupindex
                return rule, {name: match[group] for name, group in named.items() if match[group]}
        return None


@functools.cache
def packaged_rules() -> RuleSet:
    """The rules that come with Holdfast.

    Raises:
        BadUse: a rule file is broken; the message names file and rule.
    """
    folder = resources.files("holdfast.diagnose") / "rules"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return load_rules({name: (folder / name).read_text("utf-8") for name in names})


def load_rules(topics: Mapping[str, str]) -> RuleSet:
    """Read topic files, given as name and YAML text.

    Raises:
        BadUse: a file or rule is not as the module says; the message names both and what is allowed.
    """
    ordered: list[tuple[int, str, list[Rule]]] = []
    hot_words: set[str] = set()
    for name, text in topics.items():
        try:
            topic = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadUse(f"{name}: not YAML ({error}). Mend the file.") from error
        if not isinstance(topic, dict) or set(topic) != {"order", "hot", "defaults", "rules"}:
            raise BadUse(f"{name}: a topic has exactly order, hot, defaults and rules. Mend the file.")
        hot_words |= {str(word).lower() for word in topic["hot"]}
        rules = [_rule(name, topic["defaults"] or {}, given) for given in topic["rules"]]
        ordered.append((int(topic["order"]), name, rules))
    rules = [rule for _, _, group in sorted(ordered, key=lambda one: one[:2]) for rule in group]
    for rule in rules:
        if sum(other.id == rule.id for other in rules) > 1:
            raise BadUse(f"rule {rule.id}: two rules have this id. Rename one.")
    return RuleSet(rules, hot_words)


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "role": get_args(RuleRole),
    "reason": tuple(CATEGORIES),
    "action": get_args(Action),
    "category": get_args(Category),
    "where": get_args(Where),
}
_FIELDS: Final = {field.name: field for field in fields(Rule)}


def _rule(file: str, defaults: Mapping[str, Any], given: Any) -> Rule:
    if not isinstance(given, dict):
        raise BadUse(f"{file}: a rule is a mapping, not {given!r}. Mend the file.")
    values = {**defaults, **given}
    at = f"{file}: rule {values.get('id', '(without id)')}"
    if unknown := sorted(set(values) - set(_FIELDS)):
        raise BadUse(f"{at}: unknown field {unknown[0]!r}. Allowed: {', '.join(_FIELDS)}.")
    required = [name for name, field in _FIELDS.items() if field.default is MISSING]
    if missing := [name for name in required if name not in values]:
        raise BadUse(f"{at}: field {missing[0]!r} is missing. Add it.")
    _check_values(at, values)
    _check_pattern(at, values["pattern"])
    if values["reason"] != "Others":
        values["category"] = CATEGORIES[values["reason"]]
    return Rule(**{**values, "mitigation": " ".join(values["mitigation"].split())})


def _check_values(at: str, values: dict[str, Any]) -> None:
    for name, allowed in _CHOICES.items():
        if name in values and values[name] not in allowed:
            raise BadUse(f"{at}: {name} is {values[name]!r}. Allowed: {', '.join(allowed)}.")
    for name, field in _FIELDS.items():
        if name in values and field.type in (str, bool, int) and type(values[name]) is not field.type:
            raise BadUse(f"{at}: {name} is {values[name]!r}, not a {field.type.__name__}. Mend the file.")
    if not 0 <= values["depth"] <= 100 or not 0 <= float(values["confidence"]) <= 1:
        raise BadUse(f"{at}: depth lies in 0 to 100 and confidence in 0 to 1. Mend the file.")
    for name in ("match", "no_match"):
        if not isinstance(values[name], list) or not values[name]:
            raise BadUse(f"{at}: {name} is a list of example lines, at least one. Add one.")
        values[name] = tuple(str(example) for example in values[name])


def _check_pattern(at: str, pattern: str) -> None:
    try:
        captures = set(re2.compile(pattern).groupindex)
    except re2.error as error:
        raise BadUse(f"{at}: not a pattern of RE2 ({error}). Mend it.") from error
    if captures - CAPTURES:
        unknown, allowed = min(captures - CAPTURES), ", ".join(sorted(CAPTURES))
        raise BadUse(f"{at}: unknown capture {unknown!r}. Allowed: {allowed}.")
