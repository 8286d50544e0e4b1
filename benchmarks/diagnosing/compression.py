"""Measure compressed logs: their size, and whether they keep a line of the root."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from common.table import Must, Row
from diagnosing.cases import Case, of_kind

MAX_BYTES: Final = 8192
MIN_CHARACTERS: Final = 12
"""The least length of a kept text for matching it with a root's line."""


@dataclass(frozen=True, kw_only=True)
class Squeezed:
    """One compressed case."""

    case: Case
    bytes_in: int
    bytes_out: int
    root_kept: bool


def squeeze(case: Case) -> Squeezed:
    """Compress one log.

    The root is kept if one of its lines is, by number or by text: repeated lines have several
    numbers.
    """
    from holdfast.diagnose.explain.compress import compress
    from holdfast.diagnose.explain.scan import scan
    from holdfast.diagnose.logs.files import find_files
    from holdfast.diagnose.rules.packaged import packaged_rules

    files = find_files([case.path]).files
    left = compress(files, scan(files, packaged_rules()))
    text = case.path.read_text(encoding="utf-8", errors="replace").split("\n")
    roots = [text[number - 1] for number in case.root_lines]
    kept = any(
        line.line in case.root_lines
        or (
            len(line.text.strip()) >= MIN_CHARACTERS
            and any(line.text.strip() in root for root in roots)
        )
        for line in left.lines
    )
    return Squeezed(
        case=case,
        bytes_in=case.path.stat().st_size,
        bytes_out=len(left.text.encode()),
        root_kept=kept,
    )


def rows(cases: Sequence[Case], of: str) -> Iterator[Row]:
    """Yield rows over all noisy logs; no peer makes such a text without a model."""
    squeezed = [squeeze(case) for case in of_kind(cases, "noisy")]
    if not squeezed:
        return
    bytes_in, bytes_out = (
        sum(one.bytes_in for one in squeezed),
        sum(one.bytes_out for one in squeezed),
    )
    lost = [one.case.id for one in squeezed if not one.root_kept]
    named = f" [lost: {', '.join(lost[:6])}]" if lost else ""
    yield Row(
        measure=f"bytes in ÷ bytes out, {of}, noisy",
        ours=bytes_in / max(1, bytes_out),
        unit="",
        must=Must(">=", 200),
    )
    yield Row(
        measure=f"root line kept, {of}, noisy ({len(squeezed) - len(lost)} of {len(squeezed)}){named}",
        ours=1 - len(lost) / len(squeezed), unit="", must=Must("=", 1),
    )  # fmt: skip
    yield Row(
        measure=f"most bytes of text, {of}, noisy", ours=max(one.bytes_out for one in squeezed), unit="bytes",
        must=Must("<=", MAX_BYTES),
    )  # fmt: skip
