"""Load rules from YAML files, check the rules, and match lines with them in linear time.

A topic file in `rules/topics` has four keys:

* `order`: the place of the topic among all topics; the first rule that matches a line decides the
  meaning of the line
* `hot`: words, in upper or lower case; each line that the rules match must have one of them, so
  that a fast search for these words skips most lines of a log
* `defaults`: fields for all rules that do not set them
* `rules`: the rules, with the fields of `Rule`
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

import re2
import yaml

from holdfast.core.errors import BadUse
from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category, Ending
from holdfast.diagnose.shapes import Shapes, shape_of, with_own_digits

ROUTINE: Final = "routine"
"""The kind of rules whose lines are no events. Such a rule protects its lines from later rules."""
ENDING: Final = "ending"
"""The kind of rules whose lines state how a job or a process ended. Such lines are no causes."""
Where = Literal["line", "user_exception", "library_exception"]
CAPTURES: Final = frozenset(
    {"rank", "local_rank", "node", "gpu", "link", "pid", "ranks", "reporter", "enqueued"}
)
"""The named groups that a pattern may have. `ranks` captures several ranks, separated by commas or
blanks. `pid` captures a process id, whose rank another line may state. `reporter` captures the rank
that reports on other ranks, and `enqueued` the number of its last enqueued collective. The other
groups locate the fault.
"""
_SET_MEMORY_BYTES: Final = 64 << 20
_NEVER: Final = r"[^\x00-\x{10FFFF}]"
_GROUP: Final = re2.compile(r"\(\?P<(\w+)>")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The meaning of one kind of line."""

    id: str
    pattern: str
    """The RE2 pattern, which is searched in the line without its prefixes."""
    kind: str
    """The kind of event: a kind in `causes.yaml`, `routine` or `ending`."""
    reason: str
    action: Action
    restart_helps: bool
    mitigation: str
    confidence: float
    source: str
    """The source of the wording, such as a source file."""
    match: tuple[str, ...]
    no_match: tuple[str, ...]
    category: Category = "Unknown"
    """The category of the reason; set only for the reason `Others`, since other reasons imply a
    category.
    """
    where: Where = "line"
    """The lines to which the rule applies. A rule for `user_exception` or `library_exception`
    matches only the last line of a traceback, whose deepest frame must be in the user's own code,
    or in other code.
    """
    first_death: bool = False
    """True if a match means that the rank died before all others, and not because of a peer. The
    errors of other ranks then follow from this death."""
    ending: Ending = ""
    """The statement of the line about the end of the job."""
    alone: float | None = None
    """The cost, in nats, that such a line begins a failure; set only if it differs from the cost of
    the kind."""

    @functools.cached_property
    def regex(self) -> Any:
        """The compiled pattern."""
        return re2.compile(self.pattern)

    def places(self, text: str) -> tuple[tuple[str, int, int], ...]:
        """Return name, start and end of each non-empty group in `text`, which must match the rule."""
        if not self.regex.groupindex:
            return ()
        match = self.regex.search(text)
        spans = ((name, *match.span(group)) for name, group in self.regex.groupindex.items())
        return tuple((name, at, end) for name, at, end in spans if at < end)

    @property
    def weight(self) -> float:
        """The cost, in nats, that a line of this rule is the root, without other evidence."""
        return (
            (kinds()[self.kind].alone if self.alone is None else self.alone) + 1.0 - self.confidence
        )


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Rules on one subject. The first rule that matches a line decides the meaning of the line."""

    name: str
    order: int
    """The place of the topic among all topics, which are tried in ascending order."""
    hot: frozenset[str]
    """Words in lower case. Each line that a rule for lines (not only for tracebacks) matches has
    one of these words.
    """
    rules: tuple[Rule, ...]

    @functools.cached_property
    def _set(self) -> Any:
        options = re2.Options()
        options.max_mem = _SET_MEMORY_BYTES
        made = re2.Set.SearchSet(options)
        for rule in self.rules:
            made.Add(rule.pattern)
        made.Compile()
        return made

    @functools.cached_property
    def _any_digits(self) -> Any:
        """A set of the patterns that contain literal digits, loosened; None if there are none.

        See `shapes.with_own_digits`.
        """
        loose = with_own_digits(rule.pattern for rule in self.rules)
        if not loose:
            return None
        made = re2.Set.SearchSet(re2.Options())
        for pattern in loose:
            made.Add(pattern)
        made.Compile()
        return made

    def digits_matter(self, text: str) -> bool:
        """Return True if a different number in `text` could make a different rule match."""
        return self._any_digits is not None and bool(self._any_digits.Match(text))

    @functools.cached_property
    def for_exceptions(self) -> bool:
        """True if a rule applies to the last lines of tracebacks, which may have no hot word."""
        return any(rule.where != "line" for rule in self.rules)

    def find(self, text: str, where: Where) -> Rule | None:
        """Return the first rule that applies to `where` and matches `text`.

        Rules for plain lines apply everywhere.
        """
        fits = (self.rules[index] for index in sorted(self._set.Match(text) or ()))
        return next((rule for rule in fits if rule.where in ("line", where)), None)


_Found: TypeAlias = tuple[Rule | None, tuple[tuple[str, int, int], ...]]
"""A rule that matches a text, and the places of its captures in the text."""


class RuleSet:
    """All topics in ascending order.

    A topic is tried only on lines that have one of its hot words. The reason is speed: a single set
    of all patterns is too large for RE2's automaton, and takes 0.7 ms per line.
    """

    def __init__(self, topics: Iterable[Topic]) -> None:
        self.topics = tuple(sorted(topics, key=lambda topic: (topic.order, topic.name)))
        self.rules = tuple(rule for topic in self.topics for rule in topic.rules)
        ids = Counter(rule.id for rule in self.rules)
        if twice := next((one for one, count in ids.items() if count > 1), None):
            raise BadUse(f"rule {twice}: two rules have this id. Rename one.")
        self.hot = re2.compile(
            f"(?i)(?:{_any_of(frozenset().union(*(topic.hot for topic in self.topics)))})".encode()
        )
        """Matches the bytes of each line that a rule for lines can match."""
        self._hot_topics = re2.Set.SearchSet(re2.Options())
        for topic in self.topics:
            self._hot_topics.Add(f"(?i)(?:{_any_of(topic.hot)})")
        self._hot_topics.Compile()
        self._for_exceptions = {
            index for index, topic in enumerate(self.topics) if topic.for_exceptions
        }
        words = frozenset().union(*(topic.hot for topic in self.topics))
        with_digits = frozenset(word for word in words if any(map(str.isdigit, word)))
        self._hot_with_digits = re2.compile(f"(?i)(?:{_any_of(with_digits)})")
        """Matches texts whose numbers decide which topics are tried."""
        self._known: dict[Where, Shapes[_Found]] = {where: Shapes() for where in get_args(Where)}

    def find(self, text: str, where: Where = "line") -> tuple[Rule, dict[str, str]] | None:
        """Return the first rule that applies to `where` and matches `text`, with its captures.

        Rules for plain lines apply everywhere.
        """
        shape = shape_of(text)
        known = self._known[where]
        is_of_shape = self._hot_with_digits.search(text) is None
        kept = known.get(shape) if is_of_shape else None
        if kept is None:
            rule = self._first(text, where)
            kept = (rule, () if rule is None else rule.places(text))
            if is_of_shape and known.is_worth_keeping(shape) and not self._matter(text, where):
                known.keep(shape, kept)
        rule, places = kept
        return None if rule is None else (rule, {name: text[at:end] for name, at, end in places})

    def _first(self, text: str, where: Where) -> Rule | None:
        fits = (self.topics[index].find(text, where) for index in self._topics_for(text, where))
        return next((rule for rule in fits if rule is not None), None)

    def _topics_for(self, text: str, where: Where) -> list[int]:
        topics = set(self._hot_topics.Match(text) or ())
        return sorted(topics if where == "line" else topics | self._for_exceptions)

    def _matter(self, text: str, where: Where) -> bool:
        """Return True if a topic that is tried on `text` has rules that depend on its numbers."""
        return any(
            self.topics[index].digits_matter(text) for index in self._topics_for(text, where)
        )

    def digits_matter(self, text: str) -> bool:
        """Return True if a different number in `text` could change the meaning of the line."""
        return any(
            self.topics[index].digits_matter(text) for index in self._hot_topics.Match(text) or ()
        )


def _any_of(words: Iterable[str]) -> str:
    return "|".join(sorted(re2.escape(word) for word in words)) or _NEVER


def parse_topic(name: str, text: str) -> Topic:
    """Parse a topic file, given as its name and its YAML text.

    Raises:
        BadUse: the file or a rule is malformed; the message names the file, the rule and the
            allowed values.
    """
    try:
        given = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise BadUse(f"{name}: not YAML ({error}). Mend the file.") from error
    if not isinstance(given, dict) or set(given) != {"order", "hot", "defaults", "rules"}:
        raise BadUse(f"{name}: a topic has exactly order, hot, defaults and rules. Mend the file.")
    lists = isinstance(given["hot"], list) and isinstance(given["rules"], list)
    if not (lists and isinstance(given["defaults"] or {}, dict) and type(given["order"]) is int):
        raise BadUse(
            f"{name}: order is a number, hot and rules are lists, defaults is a mapping. Mend the file."
        )
    rules = tuple(_rule(name, given["defaults"] or {}, one) for one in given["rules"])
    hot = frozenset(str(word).lower() for word in given["hot"])
    return Topic(name=name, order=given["order"], hot=hot, rules=rules)


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "kind": (*kinds(), ROUTINE, ENDING),
    "reason": tuple(CATEGORIES),
    "action": get_args(Action),
    "category": get_args(Category),
    "where": get_args(Where),
    "ending": get_args(Ending),
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
        if (
            name in values
            and field.type in (str, bool, int)
            and type(values[name]) is not field.type
        ):
            raise BadUse(
                f"{at}: {name} is {values[name]!r}, not a {field.type.__name__}. Mend the file."
            )
    for name in ("confidence", "alone"):
        if not isinstance(values.get(name) or 0, int | float):
            raise BadUse(f"{at}: {name} is {values[name]!r}, not a number. Mend the file.")
    if not 0 <= float(values["confidence"]) <= 1:
        raise BadUse(f"{at}: confidence lies in 0 to 1. Mend the file.")
    for name in ("match", "no_match"):
        if not isinstance(values[name], list) or not values[name]:
            raise BadUse(f"{at}: {name} is a list of example lines, at least one. Add one.")
        values[name] = tuple(str(example) for example in values[name])


def _check_pattern(at: str, pattern: str) -> None:
    names = _GROUP.findall(pattern)
    # RE2's Python binding accepts a group name that occurs twice, but returns no value for it.
    if len(names) != len(set(names)):
        raise BadUse(f"{at}: a capture occurs twice. Use one alternation within it, or two rules.")
    try:
        captures = set(re2.compile(pattern).groupindex)
    except re2.error as error:
        raise BadUse(f"{at}: not a pattern of RE2 ({error}). Mend it.") from error
    if captures - CAPTURES:
        unknown, allowed = min(captures - CAPTURES), ", ".join(sorted(CAPTURES))
        raise BadUse(f"{at}: unknown capture {unknown!r}. Allowed: {allowed}.")
