"""Compress a log of any size to the few lines that matter, as text for a person or a model.

Lines are chosen in this order until the budget is spent:

1. one line of each kind of event, beginning with the most likely roots
2. rare lines that no filter matches

Lines that differ only in their numbers become one line with a count. The lines are shown in the
log's order, each with its file and line number.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import re2

from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.explain.explain import explain, first_end
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.logs.files import LogFile, read_blocks
from holdfast.diagnose.logs.filters import Filter, Filters, packaged_filters
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import PROGRESS

LIMIT_BYTES: Final = 8192
RATIO: Final = 220
"""For long logs, the number of bytes of the log per byte of compressed text."""
MIN_BYTES: Final = 700
_SHAPES_LIMIT: Final = 200_000
_SELDOM: Final = 4
"""A shape of lines is rare if the log has at most this many lines of the shape."""
_LINE_CHARACTERS: Final = 240
_RAW_BYTES: Final = 2 * _LINE_CHARACTERS
_DIGITS: Final = b"0123456789"
_STRANGE: Final = re2.compile(
    r"(?i)\b(?:errors?|fail(?:ed|ure|s)?|fatal|exception|abort\w*|cannot|could not|unable|denied|refused|invalid"
    r"|corrupt\w*|lost|killed|died|crash\w*|timed? ?out|unavailable|unreachable|not found|no such|mismatch|exceeded"
    r"|missing|unexpected)\b"
)


@dataclass
class _Shape:
    file: str
    line: int
    raw: bytes
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A shown line, which represents `count` similar lines."""

    file: str
    line: int
    text: str
    count: int = 1

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.line}{times}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """The compressed logs of a job."""

    lines: tuple[Kept, ...]
    bytes_in: int
    text: str = field(init=False)

    def __post_init__(self) -> None:
        """Compose the text: for each file, a heading and the lines."""
        pieces, at = [], ""
        several = len({one.file for one in self.lines}) > 1
        for one in self.lines:
            if several and one.file != at:
                pieces.append(f"== {one.file}")
                at = one.file
            pieces.append(str(one))
        object.__setattr__(self, "text", "\n".join(pieces) + "\n" if pieces else "")


def compress(
    files: Iterable[LogFile],
    events: Iterable[Event],
    learned: Iterable[Filter] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> Compressed:
    """Compress logs to the lines that matter.

    Args:
        files: the logs.
        events: the events that `scan` found in the logs.
        learned: filters in addition to the packaged ones.
        limit_bytes: the largest size of the text in bytes.
    """
    filters = Filters((*packaged_filters(), *learned))
    bytes_in, seldom, counts = _seldom(files, filters)
    budget = min(limit_bytes, max(MIN_BYTES, bytes_in // RATIO))
    kept: dict[tuple[str, int], Kept] = {}
    for one in (*_roots(events, counts), *seldom):
        if (one.file, one.line) in kept:
            continue
        cost = len(str(one).encode()) + 1
        if cost > budget:
            continue
        budget -= cost
        kept[one.file, one.line] = one
    return Compressed(
        lines=tuple(sorted(kept.values(), key=lambda one: (one.file, one.line))), bytes_in=bytes_in
    )


def _roots(events: Iterable[Event], counts: dict[bytes, int]) -> Iterator[Kept]:
    everything = list(events)
    explanation = explain(everything, first_end(everything))
    for cluster in explanation.ranked:
        for event in cluster.events[:1]:
            if event.line > 0:
                yield Kept(
                    file=event.file,
                    line=event.line,
                    text=event.cited[:_LINE_CHARACTERS],
                    count=max(len(cluster.events), counts.get(_shape_of(event.cited.encode()), 1)),
                )


def _seldom(files: Iterable[LogFile], filters: Filters) -> tuple[int, list[Kept], dict[bytes, int]]:
    """Count the lines of each shape in `files`.

    Returns:
        The total size of the files in bytes; the rare lines that no filter matches, beginning with
            lines that have suspicious words; and the number of lines of each shape.
    """
    shapes: dict[bytes, _Shape] = {}
    bytes_in = total = 0
    for file in files:
        for block, first in read_blocks(file.path):
            bytes_in += len(block)
            for offset, raw in enumerate(block.split(b"\n")):
                if not raw:
                    continue
                total += 1
                shape = _shape_of(raw)
                known = shapes.get(shape)
                if known is not None:
                    known.count += 1
                    # The last line of each shape is shown, since this line is the nearest to the
                    # end of the job. The number of the line is its number in its own file.
                    known.file, known.line = str(file.path), first + offset
                    known.raw = raw[:_RAW_BYTES]
                elif len(shapes) < _SHAPES_LIMIT:
                    shapes[shape] = _Shape(str(file.path), first + offset, raw[:_RAW_BYTES])
    found = []
    for one in shapes.values():
        if one.count > _SELDOM or PROGRESS.search(one.raw):
            continue
        line = clean_line(one.raw, one.line)
        if not filters.routine(line.text):
            found.append((not _STRANGE.search(line.text), -one.line, one, line.cited))
    found.sort(key=lambda each: each[:2])
    lines = [
        Kept(file=one.file, line=one.line, text=cited[:_LINE_CHARACTERS], count=one.count)
        for _, _, one, cited in found
    ]
    return bytes_in, lines, {shape: one.count for shape, one in shapes.items()}


def _shape_of(raw: bytes) -> bytes:
    return raw.strip()[:256].translate(None, _DIGITS)


def worth_reading(diagnosis: Diagnosis) -> bool:
    """Return True if the rules leave the case open enough for a model."""
    return diagnosis.reason == "Unknown" or diagnosis.confidence < 0.6
