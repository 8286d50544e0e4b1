"""One raw line to clean text, its rank, and the training step it reports, if any."""

from dataclasses import dataclass
from typing import Final

import re2

TEXT_LIMIT: Final = 4096
"""Characters of a line that rules meet."""
CITED_LIMIT: Final = 400
"""Characters of a line that a diagnosis shows."""

_ANSI = re2.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL = re2.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re2.compile(
    r"\[(?:rank(?P<rank>[0-9]{1,6})|default(?P<local_rank>[0-9]{1,6}))\]:[ ]?"
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T _][0-9]{2}:[0-9]{2}:[0-9]{2}"
    r"(?:[.,][0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?\]?[ :]?"
)
_STEP_WORD = r"\b(?:global[ _]?)?(?:step|iteration|iter)s?\b[ \t]*[:=#\[]?[ \t]*"
_RATE_WORD = r"\b(?:[\w/]*loss|lr|learning[ _]rate|grad[ _]norm|ms|tok(?:ens)?/s\w*|tps|mfu|elapsed)\b"
PROGRESS = re2.compile(
    rf"(?i:{_STEP_WORD}[0-9]+[^\n\r]*{_RATE_WORD}|{_RATE_WORD}[^\n\r]*{_STEP_WORD}[0-9]"
    r"|\|[ \t]*[0-9]+/[0-9]+[ \t]*\[)".encode()
)
"""A line of training progress in the dialects of common trainers: plain `step N loss X`, Megatron, torchtitan,
DeepSpeed, tqdm, Lightning, the HF Trainer's bar. The word `step` alone is not enough: errors name theirs too."""
_STEP_NUMBER = re2.compile(rf"(?i){_STEP_WORD}([0-9]{{1,15}})|\|[ \t]*([0-9]{{1,15}})/[0-9]+[ \t]*\[")


@dataclass(frozen=True, slots=True)
class Line:
    """A cleaned line."""

    number: int
    text: str
    """Without prefixes; its indentation is kept."""
    cited: str
    """As a person would read it in the file, shortened."""
    rank: int | None
    local_rank: int | None


def clean_line(raw: bytes, number: int) -> Line:
    """Decode `raw` (invalid UTF-8 replaced), drop ANSI codes, and part its prefixes from its text."""
    whole = raw.decode("utf-8", "replace")
    if not whole.isprintable():  # tabs too, but most lines are spared the work
        whole = _CONTROL.sub(" ", _ANSI.sub("", whole))
    whole = whole.rstrip()
    text, rank, local_rank = whole, None, None
    for _ in range(4):
        if text[:1] not in "[12" or (prefix := _PREFIX.match(text)) is None:
            break
        rank = int(prefix["rank"]) if prefix["rank"] else rank
        local_rank = int(prefix["local_rank"]) if prefix["local_rank"] else local_rank
        text = text[prefix.end() :]
    cited = whole.strip()
    if len(cited) > CITED_LIMIT:
        cited = cited[: CITED_LIMIT - 1] + "…"
    return Line(number, text[:TEXT_LIMIT], cited, rank, local_rank)


def reported_step(line: Line) -> int | None:
    """The training step of a line that `PROGRESS` found."""
    if (match := _STEP_NUMBER.search(line.text)) is None:
        return None
    return int(match[1] or match[2])
