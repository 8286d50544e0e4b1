"""What a Log Agent reads: the kinds of line that no filter and no rule knows, the most frequent first, in segments.

Lines that differ only in their digits are one kind. Lines of tracebacks and lines that a rule knows are not shown; they
are kept as `guarded`: no filter may drop one of them. Memory does not grow with the log.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import re2

from holdfast.diagnose.logs.files import LogFile, read_blocks
from holdfast.diagnose.logs.filters import Filter, Filters, packaged_filters
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import PROGRESS
from holdfast.diagnose.rules.rules import ROUTINE, RuleSet

SEGMENTS_LIMIT: Final = 8
LINES_LIMIT: Final = 40
_TEXT_CHARACTERS: Final = 200
_GUARDED_LIMIT: Final = 2000
_KINDS_LIMIT: Final = 100_000
_DIGITS: Final = b"0123456789"
_TRACEBACK: Final = re2.compile(
    r'^\s*(?:Traceback \(most recent call last\)|File "[^"]*", line \d+)'
)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Lines without their prefixes."""

    segments: tuple[tuple[str, ...], ...] = ()
    """Each to be shown at once; no line stands in two."""
    guarded: tuple[str, ...] = ()
    """Lines that no filter may drop."""


def segments_of(
    files: Iterable[LogFile], rules: RuleSet, learned: Iterable[Filter] = ()
) -> Segments:
    """The segments of `files`; `learned` are filters beside the packaged ones."""
    filters = Filters((*packaged_filters(), *learned))
    counts: dict[bytes, int] = {}
    texts: dict[bytes, str] = {}
    guarded: dict[str, None] = {}
    for raw, follows_frame in _lines(files):
        kind = raw.strip()[:256].translate(None, _DIGITS)
        if kind in counts:
            counts[kind] += 1
            continue
        if len(counts) >= _KINDS_LIMIT:
            continue
        counts[kind] = 1
        text = clean_line(raw, 0).text
        known = rules.find(text)
        if (
            follows_frame
            or _TRACEBACK.search(text)
            or (known is not None and known[0].kind != ROUTINE)
        ):
            if len(guarded) < _GUARDED_LIMIT:
                guarded[text] = None
        elif text.strip() and not PROGRESS.search(raw) and not filters.routine(text):
            texts[kind] = text[:_TEXT_CHARACTERS]
    frequent = sorted(texts, key=lambda kind: (-counts[kind], texts[kind]))[
        : SEGMENTS_LIMIT * LINES_LIMIT
    ]
    shown = [texts[kind] for kind in frequent]
    cut = tuple(tuple(shown[at : at + LINES_LIMIT]) for at in range(0, len(shown), LINES_LIMIT))
    return Segments(segments=cut, guarded=tuple(guarded))


def _lines(files: Iterable[LogFile]) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it follows a frame of a traceback: then it is that frame's source."""
    for file in files:
        after_frame = False
        for block, _ in read_blocks(file.path):
            for line in block.replace(b"\r", b"\n").split(b"\n"):
                if line:
                    yield line, after_frame
                    after_frame = b'File "' in line and b'", line ' in line
