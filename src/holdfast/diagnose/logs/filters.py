"""Recognise routine lines by filters, which are packaged or learned from good runs.

A filter file, such as `filters.yaml`, is a list of entries `{id, pattern, source, match}`. Filters
are matched with lines without prefixes. `compress` drops the lines that a filter matches. The scan
needs no filters, since it reads only lines with a hot word of a rule.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import re2
import yaml

from holdfast.core.errors import BadUse

_FIELDS: Final = {"id", "pattern", "source", "match"}
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One kind of routine output."""

    id: str
    pattern: str
    """The RE2 pattern, searched in the line without its prefixes."""
    source: str
    match: tuple[str, ...]
    """Example lines that the filter drops."""


class Filters:
    """Filters that are matched together in one pass."""

    def __init__(self, filters: Iterable[Filter]) -> None:
        self.filters = tuple(filters)
        self._set = re2.Set.SearchSet(re2.Options())
        for one in self.filters:
            self._set.Add(one.pattern)
        self._set.Compile()

    def routine(self, text: str) -> bool:
        """Return True if one of the filters matches `text`."""
        return bool(self.filters) and bool(self._set.Match(text))


@functools.cache
def packaged_filters() -> tuple[Filter, ...]:
    """Return the packaged filters."""
    text = (resources.files("holdfast.diagnose.logs") / "filters.yaml").read_text("utf-8")
    return parse_filters("filters.yaml", text)


def parse_filters(name: str, text: str) -> tuple[Filter, ...]:
    """Return the filters in a file with the name `name` and the content `text`.

    Raises:
        BadUse: the file is malformed; the message names the file and the filter.
    """
    try:
        given = yaml.load(text, Loader=_LOADER) or []
    except yaml.YAMLError as error:
        raise BadUse(f"{name}: not YAML ({error}). Mend the file.") from error
    if not isinstance(given, list):
        raise BadUse(f"{name}: a list of filters is wanted. Mend the file.")
    return tuple(_filter(name, one) for one in given)


def _filter(name: str, given: Any) -> Filter:
    if not isinstance(given, dict) or set(given) != _FIELDS or not all(given.values()):
        raise BadUse(
            f"{name}: a filter has exactly {', '.join(sorted(_FIELDS))}. Mend {given!r:.80}."
        )
    made = Filter(**{**given, "match": tuple(map(str, given["match"]))})
    try:
        pattern = re2.compile(made.pattern)
    except re2.error as error:
        raise BadUse(
            f"{name}: filter {made.id}: not a pattern of RE2 ({error}). Mend it."
        ) from error
    if missed := next((line for line in made.match if not pattern.search(line)), None):
        raise BadUse(
            f"{name}: filter {made.id} does not match its own example {missed!r:.80}. Mend it."
        )
    return made
