"""What a model says, taken apart strictly: one JSON object of exactly the fields that were asked for, or nothing.

Nothing in an answer is executed or looked up; a field too many, a word that is not on the list, a number that is no
line makes the whole answer count for nothing.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any, Final, NoReturn

_DEPTH_LIMIT: Final = 8
_THINKING: Final = ("<think>", "</think>")
"""Some models print what they think before they answer."""


class Malformed(ValueError):
    """An answer is not as it was asked for; the message says how, in a few words."""


def json_object(text: str) -> dict[str, Any]:
    """The one JSON object that `text` is; around it a code fence is forgiven, and thoughts before it.

    Raises:
        Malformed: it is none, has a field twice, or is nested deeper than any answer.
    """
    text = text.strip()
    if text.startswith(_THINKING[0]):
        text = text.partition(_THINKING[1])[2].strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").strip()
    try:
        given = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise Malformed("not JSON") from error
    if not isinstance(given, dict):
        raise Malformed("no JSON object")
    if _depth(given) > _DEPTH_LIMIT:
        raise Malformed("nested too deep")
    return given


def with_fields(given: Any, names: Iterable[str]) -> dict[str, Any]:
    """`given`, an object with exactly these fields.

    Raises:
        Malformed: it has others.
    """
    if not isinstance(given, dict) or set(given) != set(names):
        raise Malformed("other fields than were asked for")
    return given


def text_field(given: dict[str, Any], name: str, *, most: int, least: int = 1) -> str:
    """A text of bounded length.

    Raises:
        Malformed: it is none.
    """
    value = given[name]
    if not isinstance(value, str) or not least <= len(value.strip()) <= most:
        raise Malformed(f"{name} is no text of {least} to {most} characters")
    return value.strip()


def choice_field(given: dict[str, Any], name: str, allowed: Collection[str]) -> str:
    """One of the words that are allowed.

    Raises:
        Malformed: it is none of them.
    """
    value = given[name]
    if not isinstance(value, str) or value not in allowed:
        raise Malformed(f"{name} is not on the list")
    return value


def list_field(given: dict[str, Any], name: str, *, most: int, least: int = 0) -> list[Any]:
    """A list of bounded length.

    Raises:
        Malformed: it is none.
    """
    value = given[name]
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise Malformed(f"{name} is no list of {least} to {most}")
    return value


def line_number(value: Any, lines: int) -> int:
    """The number of one of the `lines` that were shown, 1 the first.

    Raises:
        Malformed: there is no such line.
    """
    if type(value) is not int or not 1 <= value <= lines:  # True is an int to Python
        raise Malformed("it cites a line that does not exist")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Malformed("a field stands there twice")
    return made


def _no_number(word: str) -> NoReturn:
    raise Malformed(f"{word} is no JSON")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        1 + max((_depth(one) for one in inner), default=0) if isinstance(value, dict | list) else 0
    )
