"""Recognise lines that differ in their numbers alone: what was found in one line holds for all of them.

The shape of a text is the text with 1 in place of each digit from 2 to 9. A pattern that names none of these digits
matches the same places in all texts of one shape. So a line of a known shape costs one lookup.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import re2

_ONE_DIGIT: Final = str.maketrans("23456789", "11111111")
_SHAPES: Final = 4096
_SHAPE_CHARACTERS: Final = 512
_OWN_DIGITS: Final = re2.compile(r"^\[(?:[^0-9\\]|\\.)*(?:[1-9](?:-[0-9])?|0-[0-8])")
"""A class with some of the digits, not all."""
_PATTERN_PARTS = re.compile(  # no log is read with this, and RE2's binding takes longer
    r"(\\.|\{[0-9,]+\}|\[(?:\\.|[^\]\\])*\]|\(\?P<\w+>)|([0-9]+)"
)
_NO_ZERO: Final = "[1-9]"
"""The one class of some digits that a shape keeps apart."""

Found = TypeVar("Found")


def shape_of(text: str) -> str:
    """Return the shape of `text`, which has the length of `text`."""
    return text.translate(_ONE_DIGIT)


def with_any_digits(pattern: str) -> str:
    """Return `pattern` with any number where it has a certain one."""

    def loosened(match: Any) -> str:
        kept = match[1]
        if kept is None:
            return r"(?:\d+)"
        return f"(?:{kept}|[0-9])" if kept[0] == "[" and _OWN_DIGITS.search(kept) else kept

    return str(_PATTERN_PARTS.sub(loosened, pattern))


def with_own_digits(patterns: Iterable[str]) -> list[str]:
    """Return the patterns that tell texts of one shape apart, each with any number where it has a certain one."""
    plain = [pattern.replace(_NO_ZERO, r"\d") for pattern in patterns]
    return [
        loose
        for loose, pattern in zip(map(with_any_digits, plain), plain, strict=True)
        if loose != pattern
    ]


class Shapes(Generic[Found]):
    """Keep what was found in texts, by shape, for shapes that come again."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self._met: set[int] = set()

    def get(self, shape: str) -> Found | None:
        """Return what is kept for `shape`."""
        return self._found.get(shape)

    def is_worth_keeping(self, shape: str) -> bool:
        """Return whether `shape` was met before: most texts of a short log come once."""
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
        """Keep what was found in a text of `shape`."""
        if len(self._found) >= _SHAPES:
            self._found.clear()
        self._found[shape] = found
