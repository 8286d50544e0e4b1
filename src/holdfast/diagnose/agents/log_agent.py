"""Propose filters for routine lines of a log, from several samples of a model.

Parts of the log, called segments, are shown to the model, which proposes patterns. Two patterns
count as the same candidate if they drop the same lines of a segment. A candidate is accepted under
three conditions: more than half of the samples propose the candidate, the model keeps it when it
reads the accepted candidates a second time, and `_unsafe` finds no objection. The results have the
form of `filters.yaml`; the caller decides whether to use them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2

from holdfast.diagnose.agents.answers import (
    Malformed,
    json_object,
    line_number,
    list_field,
    text_field,
    with_fields,
)
from holdfast.diagnose.agents.endpoint import Endpoint, Prompt, Reply
from holdfast.diagnose.agents.prompts import FILTER_INSTRUCTIONS, VOTE_INSTRUCTIONS
from holdfast.diagnose.agents.proposal import PATTERN_CHARACTERS, compiled, spells_out
from holdfast.diagnose.agents.redact import redact
from holdfast.diagnose.agents.untrusted import Draw, Shown, draw_mark, fenced, show
from holdfast.diagnose.logs.files import LogFile, read_blocks
from holdfast.diagnose.logs.filters import Filter, Filters, packaged_filters
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import PROGRESS
from holdfast.diagnose.rules.rules import ENDING, ROUTINE, RuleSet

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
    """Parts of a log, as lines without their prefixes."""

    segments: tuple[tuple[str, ...], ...] = ()
    """Each segment fits into one prompt. No line is in two segments."""
    guarded: tuple[str, ...] = ()
    """Lines that no filter may drop."""


def segments_of(
    files: Iterable[LogFile], rules: RuleSet, learned: Iterable[Filter] = ()
) -> Segments:
    """Return the lines of a log for which filters may be learned, cut into segments.

    Lines that differ only in numbers count as one line. Guarded lines are returned separately:
    lines of tracebacks, and lines that one of the `rules` takes for more than routine output. The
    segments leave out progress lines and lines that a packaged filter or one of the `learned`
    filters drops.
    """
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
            or (known is not None and known[0].kind not in (ROUTINE, ENDING))
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
    """Yield each line, and True if the line may be source code: it follows a traceback's frame."""
    for file in files:
        after_frame = False
        for block, _ in read_blocks(file.path):
            for line in block.replace(b"\r", b"\n").split(b"\n"):
                if line:
                    yield line, after_frame
                    after_frame = b'File "' in line and b'", line ' in line


SAMPLES: Final = 3
TEMPERATURE: Final = 0.8
_SECOND_READING_TEMPERATURE: Final = 0.0
_CANDIDATES_LIMIT: Final = 12
_EXAMPLES: Final = 2
_EXAMPLES_TO_JUDGE: Final = 4


@dataclass(frozen=True, kw_only=True)
class FilterCandidate:
    """A proposed pattern, and the lines of its segment that the pattern drops."""

    pattern: str
    drops: frozenset[int]
    """The numbers of the dropped lines in the segment; the first line is 1."""


@dataclass(frozen=True, kw_only=True)
class ProposedFilters:
    """The result of a request: the accepted filters, and notes."""

    filters: tuple[Filter, ...]
    notes: tuple[str, ...]
    """A sentence for each failed request and for each refused candidate."""


def propose_filters(
    given: Segments,
    endpoint: Endpoint,
    rules: RuleSet,
    *,
    root_lines: Iterable[str] = (),
    samples: int = SAMPLES,
    second_reading: bool = True,
    draw: Draw = draw_mark,
) -> ProposedFilters:
    """Request filters from the model that drop the routine lines in `given`.

    No accepted filter drops a line that a rule matches.

    Args:
        given: the segments of the log.
        endpoint: the model.
        rules: all rules in use, including learned rules.
        root_lines: lines of past incidents, without prefixes, that stated a root. No filter may
            drop one.
        samples: the number of answers per segment.
        second_reading: True to have the model confirm the accepted filters.
        draw: returns random marks, which are put around outside text in prompts.
    """
    shown = [show(segment, endpoint.known_secrets) for segment in given.segments]
    prompts = [
        Prompt(instructions=FILTER_INSTRUCTIONS, data=fenced("The lines", one.lines, draw()))
        for one in shown
        for _ in range(samples)
    ]
    replies = endpoint.ask(prompts, temperature=TEMPERATURE)
    known = (*root_lines, *given.guarded, *_known_lines(rules))
    guarded = dict.fromkeys(
        (*known, *(clean_line(line.encode("utf-8", "replace"), 0).text for line in known))
    )
    notes: Counter[str] = Counter()
    agreed: list[tuple[int, FilterCandidate]] = []
    for at, one in enumerate(shown):
        proposals = [
            _read(reply, given.segments[at], one, notes)
            for reply in replies[at * samples : (at + 1) * samples]
        ]
        for candidate in _majority(proposals, samples):
            if why := _unsafe(candidate, one, guarded):
                notes[f"The filter {candidate.pattern!r:.80} was refused: {why}."] += 1
            else:
                agreed.append((at, candidate))
    if second_reading and agreed:
        agreed = _read_again(agreed, shown, endpoint, draw, notes)
    filters = {one.pattern: _filter(one, given.segments[at], endpoint) for at, one in agreed}
    summed = tuple(
        note if count == 1 else f"{note} ({count} times)" for note, count in notes.items()
    )
    return ProposedFilters(filters=tuple(filters.values()), notes=summed)


def _known_lines(rules: RuleSet) -> list[str]:
    """Return the example lines of all rules except routine ones; such lines help to find a root."""
    return [
        line for rule in rules.rules if rule.kind not in (ROUTINE, ENDING) for line in rule.match
    ]


def _read(
    reply: Reply, segment: Sequence[str], shown: Shown, notes: Counter[str]
) -> list[FilterCandidate]:
    """Parse one sample; return the candidates whose patterns are valid and match the cited lines."""
    if reply.failed:
        notes[reply.failed] += 1
        return []
    try:
        given = list_field(
            with_fields(json_object(reply.text), ("filters",)), "filters", most=_CANDIDATES_LIMIT
        )
    except Malformed as error:
        notes[f"An answer of the model was dropped: {error}."] += 1
        return []
    candidates = []
    for one in given:
        try:
            candidates.append(_candidate(one, segment, shown))
        except Malformed as error:
            notes[f"A filter that the model proposed was dropped: {error}."] += 1
    return candidates


def _candidate(given: Any, segment: Sequence[str], shown: Shown) -> FilterCandidate:
    fields = with_fields(given, ("pattern", "lines"))
    text = text_field(fields, "pattern", most=PATTERN_CHARACTERS)
    cited = list_field(fields, "lines", most=len(shown.lines), least=1)
    pattern = compiled(text)
    if pattern is None:
        raise Malformed("a pattern is not valid RE2, or matches everything")
    drops = frozenset(
        number for number, line in enumerate(segment[: len(shown.lines)], 1) if pattern.search(line)
    )
    if not {line_number(one, len(shown.lines)) for one in cited} <= drops:
        raise Malformed("a pattern does not match the lines that it was proposed for")
    return FilterCandidate(pattern=text, drops=drops)


def _majority(
    proposals: Sequence[Sequence[FilterCandidate]], samples: int
) -> list[FilterCandidate]:
    """Return the candidates in more than half of the samples, each with its longest pattern."""
    votes: Counter[frozenset[int]] = Counter()
    patterns: dict[frozenset[int], list[str]] = {}
    for proposal in proposals:
        votes.update({one.drops for one in proposal})
        for one in proposal:
            patterns.setdefault(one.drops, []).append(one.pattern)
    return [
        FilterCandidate(
            pattern=max(patterns[drops], key=lambda pattern: (len(pattern), pattern)), drops=drops
        )
        for drops, count in votes.items()
        if 2 * count > samples
    ]


def _unsafe(candidate: FilterCandidate, shown: Shown, guarded: Iterable[str]) -> str:
    """Return why a candidate must not be used; an empty text if it may be used."""
    pattern = compiled(candidate.pattern)
    if pattern is None or not spells_out(candidate.pattern):
        return "the pattern contains no words"
    if len(candidate.drops) == len(shown.lines) > 1:
        return "it drops every line shown"
    dropped = next((line for line in guarded if pattern.search(line)), None)
    return "" if dropped is None else f"it would drop {redact(dropped)!r:.80}"


def _read_again(
    agreed: Sequence[tuple[int, FilterCandidate]],
    shown: Sequence[Shown],
    endpoint: Endpoint,
    draw: Draw,
    notes: Counter[str],
) -> list[tuple[int, FilterCandidate]]:
    """Return the candidates that the model keeps when it reads them again.

    If the request for a segment fails, no candidate of this segment is kept.
    """
    by_segment: dict[int, list[FilterCandidate]] = {}
    for at, candidate in agreed:
        by_segment.setdefault(at, []).append(candidate)
    prompts = []
    for at, candidates in by_segment.items():
        lines = show(_to_judge(one, shown[at]) for one in candidates).lines
        prompts.append(
            Prompt(instructions=VOTE_INSTRUCTIONS, data=fenced("The candidates", lines, draw()))
        )
    replies = endpoint.ask(prompts, temperature=_SECOND_READING_TEMPERATURE)
    kept: list[tuple[int, FilterCandidate]] = []
    for (at, candidates), reply in zip(by_segment.items(), replies, strict=True):
        if reply.failed:
            notes[reply.failed] += 1
            continue
        try:
            given = list_field(
                with_fields(json_object(reply.text), ("keep",)), "keep", most=len(candidates)
            )
            numbers = {line_number(one, len(candidates)) for one in given}
        except Malformed as error:
            notes[f"A second reading was dropped: {error}."] += 1
            continue
        kept.extend((at, one) for number, one in enumerate(candidates, 1) if number in numbers)
    return kept


def _to_judge(candidate: FilterCandidate, shown: Shown) -> str:
    examples = " | ".join(
        shown.lines[number - 1][:80] for number in sorted(candidate.drops)[:_EXAMPLES_TO_JUDGE]
    )
    return f"{candidate.pattern}   drops: {examples}"


def _filter(candidate: FilterCandidate, segment: Sequence[str], endpoint: Endpoint) -> Filter:
    pattern = compiled(candidate.pattern)
    lines = [segment[number - 1] for number in sorted(candidate.drops)]
    clean = [text for line in lines if pattern.search(text := redact(line))]
    return Filter(
        id=f"model-{hashlib.sha256(candidate.pattern.encode()).hexdigest()[:12]}",
        pattern=candidate.pattern,
        source=f"proposed by the model {endpoint.model}",
        match=tuple((clean or lines)[:_EXAMPLES]),
    )
