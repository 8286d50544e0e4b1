"""Convert a raw line of a log to clean text and the fields in its prefixes."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, TypeAlias

import re2
import yaml

from holdfast.diagnose.logs.prefixes import Prefixes
from holdfast.diagnose.shapes import Shapes, shape_of, with_own_digits

TEXT_LIMIT: Final = 4096
"""Rules are matched with this number of characters at the beginning of a line."""
CITED_LIMIT: Final = 400
"""A diagnosis shows this number of characters of a line."""
_PREFIXES_LIMIT: Final = 6

_ANSI = re2.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL = re2.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x{9f}\x{2028}-\x{202e}\x{2066}-\x{2069}]")
"""Matches characters that can change the output of terminals: control characters and marks of text
direction.
"""
_BOX = re2.compile(r"^[│|] (.*?)[ ]*[│|]$")
"""Matches a line within the box that the rich library draws around a traceback."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line without control characters, separated into prefixes and text."""

    number: int
    text: str
    """The text after the prefixes, including its indentation."""
    cited: str
    """The whole line as people read it in the file, shortened."""
    rank: int | None
    local_rank: int | None
    host: str | None = None
    time: str | None = None
    """The time as printed. If a line has two times, it is the outer one, because the same clock
    then stamps all lines.
    """
    stream: str | None = None
    """`stdout` or `stderr`, if a prefix names the stream."""
    process: str | None = None
    """Other fields of a learned prefix, which identify the process that printed the line."""


class Dialects:
    """The packaged kinds of prefixes, from `dialects.yaml`."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.examples = [(one["id"], *one["example"]) for one in given]
        patterns = [one["pattern"] for one in given]
        self._set = _begins(patterns)
        self._with_own_digits = _begins(with_own_digits(patterns))
        self._patterns = [re2.compile(pattern) for pattern in patterns]
        self._groups = [sorted(one.groupindex.items()) for one in self._patterns]
        self._known: Shapes[_Parted] = Shapes()

    def part(self, text: str) -> tuple[str, dict[str, str]]:
        """Return `text` without its prefixes, and the fields in them.

        If there are two ranks, the later one is returned; if there are two times, the first one.
        """
        shape = shape_of(text)
        found = self._known.get(shape)
        if found is None:
            found, is_of_shape = self._find(text)
            if is_of_shape and self._known.is_worth_keeping(shape):
                self._known.keep(shape, found)
        end, places = found
        return text[end:], {name: text[begin:end] for name, begin, end in places}

    def _find(self, text: str) -> tuple["_Parted", bool]:
        """Find the prefixes and fields in `text`.

        Returns:
            The places, and True if the places are the same in all texts with the shape of `text`.
        """
        at, places, is_of_shape = 0, dict[str, tuple[int, int]](), True
        for _ in range(_PREFIXES_LIMIT):
            rest = text[at:]
            is_of_shape = is_of_shape and not self._with_own_digits.Match(rest)
            found = self._set.Match(rest)
            if not found:
                break
            first = min(found)
            prefix = self._patterns[first].match(rest)
            for name, group in self._groups[first]:
                begin, end = prefix.span(group)
                if begin < end and not (name == "time" and name in places):
                    places[name] = at + begin, at + end
            at += prefix.end()
        return (at, tuple((name, *place) for name, place in places.items())), is_of_shape


_Parted: TypeAlias = tuple[int, tuple[tuple[str, int, int], ...]]
"""The end of the prefixes of a text, and the name, start and end of each field in them."""


def _begins(patterns: Iterable[str]) -> Any:
    made = re2.Set.MatchSet(re2.Options())
    for pattern in patterns:
        made.Add(pattern)
    made.Compile()
    return made


@functools.cache
def dialects() -> Dialects:
    """Return the packaged prefixes."""
    text = (resources.files("holdfast.diagnose.logs") / "dialects.yaml").read_text("utf-8")
    return Dialects(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def clean_line(raw: bytes, number: int, learnt: Prefixes | None = None) -> Line:
    """Decode a line, remove ANSI codes, and separate the prefixes from the text.

    Args:
        raw: the bytes of the line. Invalid UTF-8 is replaced.
        number: the line's number in its file.
        learnt: the prefixes learned from the log of the line. The packaged prefixes are removed
            both before and after these.
    """
    whole = _printable(raw)
    text, fields = _parted(whole, learnt)
    if text[:1] in "│|" and (box := _BOX.search(text)):
        text = box[1]
    rank = fields.get("rank", fields.get("task"))
    cited = whole.strip()
    if len(cited) > CITED_LIMIT:
        cited = cited[: CITED_LIMIT - 1] + "…"
    return Line(
        number,
        text[:TEXT_LIMIT],
        cited,
        None if rank is None else int(rank),
        int(fields["local_rank"]) if "local_rank" in fields else None,
        fields.get("host"),
        fields.get("time"),
        fields.get("stream"),
        fields.get("process"),
    )


def _printable(raw: bytes) -> str:
    whole = raw.decode("utf-8", "replace")
    if not whole.isprintable():  # true for most lines; false with tabs
        whole = _CONTROL.sub(" ", _ANSI.sub("", whole))
    return whole.rstrip()


def _parted(whole: str, learnt: Prefixes | None) -> tuple[str, dict[str, str]]:
    text, fields = dialects().part(whole)
    if not learnt or (text[:1] in "│|" and _BOX.search(text)):
        return text, fields
    # A packaged prefix may have matched a part of a learned prefix, or a whole other prefix.
    for start, known in ((text, fields), (whole, {})):
        if (found := learnt.part(start)) is not None:
            behind, more = dialects().part(found[0])
            fields = {**known, **found[1], **more}
            outer = [one["time"] for one in (known, found[1], more) if "time" in one]
            return behind, fields | dict(zip(("time",), outer, strict=False))
    return text, fields


def learn_prefixes(learnt: Prefixes, block: bytes) -> None:
    """Learn the prefixes of a log from the next block of its lines."""
    rests = []
    for raw in learnt.sample(block):
        whole = _printable(raw.partition(b"\r")[0])
        text, _ = dialects().part(whole)
        if not _BOX.search(text):
            rests.append((text, text != whole))
    if rests:
        learnt.learn(rests)
