"""Reuse results between lines that differ only in their numbers.

The shape of a text is the text with 1 in place of each digit from 2 to 9. A pattern without these
digits matches the same places in all texts of one shape. So a line of a known shape costs one
lookup.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import re2

_ONE_DIGIT: Final = str.maketrans("23456789", "11111111")
_SHAPES: Final = 4096
_SHAPE_CHARACTERS: Final = 512
_OWN_DIGITS: Final = re2.compile(r"^\[(?:[^0-9\\]|\\.)*(?:[1-9](?:-[0-9])?|0-[0-8])")
"""A character class with some of the digits, not all."""
_PATTERN_PARTS = re.compile(  # applied to patterns, never to logs; RE2's binding is slower
    r"(\\.|\{[0-9,]+\}|\[(?:\\.|[^\]\\])*\]|\(\?P<\w+>)|([0-9]+)"
)
_NO_ZERO: Final = "[1-9]"
"""The only class of some digits that shapes keep apart."""

Found = TypeVar("Found")


def shape_of(text: str) -> str:
    """Return the shape of `text`, which has the length of `text`."""
    return text.translate(_ONE_DIGIT)


def with_any_digits(pattern: str) -> str:
    """Return `pattern` with each literal number replaced by any number."""

    def loosened(match: Any) -> str:
        kept = match[1]
        if kept is None:
            return r"(?:\d+)"
        return f"(?:{kept}|[0-9])" if kept[0] == "[" and _OWN_DIGITS.search(kept) else kept

    return str(_PATTERN_PARTS.sub(loosened, pattern))


def with_own_digits(patterns: Iterable[str]) -> list[str]:
    """Return the patterns that distinguish texts of one shape, loosened by `with_any_digits`."""
    plain = [pattern.replace(_NO_ZERO, r"\d") for pattern in patterns]
    return [
        loose
        for loose, pattern in zip(map(with_any_digits, plain), plain, strict=True)
        if loose != pattern
    ]


class Shapes(Generic[Found]):
    """Cache results by the shape of texts, for shapes that recur."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self._met: set[int] = set()

    def get(self, shape: str) -> Found | None:
        """Return the result for `shape`, or None."""
        return self._found.get(shape)

    def is_worth_keeping(self, shape: str) -> bool:
        """Return True if `shape` was seen before."""
        if len(shape) > _SHAPE_CHARACTERS:
            return False
        key = hash(shape)
        if key in self._met:
            return True
        if len(self._met) >= _SHAPES:
            self._met.clear()
        self._met.add(key)
        return False

    def keep(self, shape: str, found: Found) -> None:
        """Record the result for a text of `shape`."""
        if len(self._found) >= _SHAPES:
            self._found.clear()
        self._found[shape] = found
