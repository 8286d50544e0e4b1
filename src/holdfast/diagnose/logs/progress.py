"""Parse the training step that a line reports. The formats, or dialects, are in `progress.yaml`."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Final

import re2
import yaml

_UNITS: Final = {"k": 1e3, "M": 1e6}
_MEMORY_BYTES: Final = 64 << 20


def _given() -> Sequence[Mapping[str, Any]]:
    text = (resources.files("holdfast.diagnose.logs") / "progress.yaml").read_text("utf-8")
    given: Sequence[Mapping[str, Any]] = yaml.load(
        text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return given


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    return options


def _somewhere(pattern: str) -> str:
    """Return `pattern` without captures, to search blocks of raw lines, which begin with prefixes."""
    plain = re2.sub(r"\(\?P<\w+>", "(?:", pattern)
    flags, found, rest = plain.partition("(?i)")
    return f"(?i:{rest.removeprefix('^')})" if found else f"(?:{flags.removeprefix('^')})"


_DIALECTS: Final = _given()
_PATTERNS: Final = [re2.compile(one["pattern"], _options()) for one in _DIALECTS]
_FIRST_EPOCHS: Final = [one.get("first_epoch", 0) for one in _DIALECTS]
BARS: Final = frozenset(number for number, one in enumerate(_DIALECTS) if one.get("is_bar", False))
"""The numbers of the dialects of progress bars, whose last line is printed again on exit."""

PROGRESS: Final = re2.compile(
    "|".join(
        _somewhere(one["pattern"]) for one in _DIALECTS if "(?P<step>" in one["pattern"]
    ).encode(),
    _options(),
)
"""Matches the bytes of lines that may report a step; `reported_step` makes sure."""

_SET: Final = re2.Set.SearchSet(_options())
for _one in _DIALECTS:
    _SET.Add(_one["pattern"])
_SET.Compile()


def reported(text: str) -> tuple[int, int] | None:
    """Return the dialect's number and the training step in a line without its prefixes, or None."""
    found = _SET.Match(text)
    if not found:
        return None
    index = min(found)
    fields = _PATTERNS[index].search(text).groupdict()
    if "step" not in fields:
        return None
    step = _number(fields["step"])
    if "total" in fields:
        step += (int(fields["epoch"]) - _FIRST_EPOCHS[index]) * int(fields["total"])
    return index, step


def reported_step(text: str) -> int | None:
    """Return the training step in a line without its prefixes; None if there is none."""
    found = reported(text)
    return None if found is None else found[1]


def _number(text: str) -> int:
    if text.isdigit():
        return int(text)
    return round(float(text.rstrip("kM")) * _UNITS.get(text[-1], 1))
