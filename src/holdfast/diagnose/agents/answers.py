"""Parse a model's answer strictly: one JSON object with exactly the requested fields, or nothing.

No part of an answer is executed or looked up. The whole answer is invalid if it has an extra field,
a word that is not on the list of allowed words, or the number of a line that does not exist.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any, Final, NoReturn

_DEPTH_LIMIT: Final = 8
_THINKING: Final = ("<think>", "</think>")
"""The tags around the thoughts that some models print before they answer."""


class Malformed(ValueError):
    """An answer has the wrong form; the message describes the error in a few words."""


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`, without a code fence around it or thoughts before it.

    Raises:
        Malformed: the rest of `text` is not one JSON object, has a field twice, or is nested too
            deep.
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
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise Malformed("not JSON") from error
    if not isinstance(given, dict):
        raise Malformed("no JSON object")
    if _depth(given) > _DEPTH_LIMIT:
        raise Malformed("nested too deep")
    return given


def with_fields(given: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return `given` if it is an object with exactly the fields `names`.

    Raises:
        Malformed: the fields differ.
    """
    if not isinstance(given, dict) or set(given) != set(names):
        raise Malformed("its fields are not the requested ones")
    return given


def text_field(given: dict[str, Any], name: str, *, most: int, least: int = 1) -> str:
    """Return the field `name`, which must be a text of `least` to `most` characters.

    Raises:
        Malformed: the field is no text, or its length is out of range.
    """
    value = given[name]
    if not isinstance(value, str) or not least <= len(value.strip()) <= most:
        raise Malformed(f"{name} is not a text of {least} to {most} characters")
    return value.strip()


def choice_field(given: dict[str, Any], name: str, allowed: Collection[str]) -> str:
    """Return the field `name`, which must be one of the words in `allowed`.

    Raises:
        Malformed: the field has another value.
    """
    value = given[name]
    if not isinstance(value, str) or value not in allowed:
        raise Malformed(f"{name} is not on the list")
    return value


def list_field(given: dict[str, Any], name: str, *, most: int, least: int = 0) -> list[Any]:
    """Return the field `name`, which must be a list of `least` to `most` elements.

    Raises:
        Malformed: the field is no list, or its length is out of range.
    """
    value = given[name]
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise Malformed(f"{name} is not a list of {least} to {most}")
    return value


def line_number(value: Any, lines: int) -> int:
    """Return `value` if it is a line number from 1 to `lines`, the number of lines that were shown.

    Raises:
        Malformed: no line has this number.
    """
    if type(value) is not int or not 1 <= value <= lines:  # True is an int in Python
        raise Malformed("it cites a line that does not exist")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Malformed("a field occurs twice")
    return made


def _no_number(word: str) -> NoReturn:
    raise Malformed(f"{word} is not JSON")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        1 + max((_depth(one) for one in inner), default=0) if isinstance(value, dict | list) else 0
    )
