"""Cache results for lines that differ only in their numbers.

The shape of a text is the text with 1 in place of each digit from 2 to 9. A pattern that does not
distinguish these digits matches the same places in all texts of one shape. So a line whose shape is
known costs only one lookup.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import re2

_ONE_DIGIT: Final = str.maketrans("23456789", "11111111")
_SHAPES: Final = 4096
_SHAPE_CHARACTERS: Final = 512
_PATTERN_PARTS = re.compile(  # for patterns, never logs; RE2 would be slower
    r"(?P<atom>\\(?:x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|[0-7]{1,3}|[pP](?:\{\^?\w+\}|\w)|.)"
    r"|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\])"
    r"|(?P<number>[0-9]+)|\{[0-9]+(?:,[0-9]*)?\}|\(\?P?<\w+>"
)
_QUOTE: Final = r"\Q"
"""The beginning of literal text in a pattern, which `_PATTERN_PARTS` does not split."""

Found = TypeVar("Found")


def shape_of(text: str) -> str:
    """Return the shape of `text`, which has the length of `text`."""
    return text.translate(_ONE_DIGIT)


def with_any_digits(pattern: str) -> str:
    """Return `pattern`, loosened such that it matches all texts of one shape or none of them."""

    def loosened(match: Any) -> str:
        if match["number"]:
            return r"(?:\d+)"
        if match["atom"] and _has_own_digits(match["atom"]):
            return f"(?:{match['atom']}|[0-9])"
        return str(match[0])

    return "[0-9]" if _QUOTE in pattern else str(_PATTERN_PARTS.sub(loosened, pattern))


@functools.cache
def _has_own_digits(atom: str) -> bool:
    """Return True if an escape or a character class matches some but not all digits from 1 to 9."""
    compiled = re2.compile(atom)
    return len({compiled.fullmatch(digit) is None for digit in "123456789"}) > 1


def with_own_digits(patterns: Iterable[str]) -> list[str]:
    """Return the patterns that distinguish texts of one shape, loosened by `with_any_digits`."""
    return [loose for pattern in patterns if (loose := with_any_digits(pattern)) != pattern]


class Shapes(Generic[Found]):
    """A cache of results by the shape of the text, for shapes that recur."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self._met: set[int] = set()

    def get(self, shape: str) -> Found | None:
        """Return the result for `shape`, or None."""
        return self._found.get(shape)

    def is_worth_keeping(self, shape: str) -> bool:
        """Return True if `shape` has been seen before, so that it is worth a place in the cache."""
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
        """Store the result for texts of `shape`."""
        if len(self._found) >= _SHAPES:
            self._found.clear()
        self._found[shape] = found
