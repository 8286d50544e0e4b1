"""Score the same failures within several kinds of routine noise and places of the cascade.

| make | source |

| make | where it comes from |
|---|---|
| first, second | the labelled cases, `noisy` and `noisy2` |
| foreign | `failure_lab.foreign`, around the labelled cases alone and around what the laboratory recorded |

Confidence is judged in each make by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from common.table import Must, Row
from diagnosing.accuracy import Judged
from diagnosing.cases import Case, other_cases
from diagnosing.scoring import (
    BINS,
    Judge,
    calibration_error,
    confidences,
    confident_and_wrong,
    reason_right,
    restart_right,
    root_cited,
    scope_right,
    tally,
)
from failure_lab.foreign import surround
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import reported_step

BASELINE: Final = "priority list"
CALIBRATING: Final = "foreign"
"""The make that the numbers of `holdfast.diagnose.explain.confidence` are measured on."""
_MUSTS: Final = {"first": 0.90, "second": 0.90, "foreign": 0.85}
_WAYS: Final[tuple[tuple[str, bool], ...]] = (
    ("cascade first", True),
    ("cascade after", False),
)
_JUDGES: Final[tuple[tuple[str, Judge, float], ...]] = (
    ("root line cited", root_cited, 0.88),
    ("rank, node or GPU", scope_right, 0.85),
    ("restart decision", restart_right, 0.90),
)


def makes(
    dev: Sequence[Case], folder: Path, recorded: Sequence[Case], work: Path
) -> dict[str, list[Case]]:
    """Return the cases of each make that can be had.

    Args:
        dev: the labelled cases, `clean` and `noisy`.
        folder: the folder of the labelled cases.
        recorded: the laboratory's recordings; may be empty.
        work: the folder for the logs of the foreign make.
    """
    programs = {case.program for case in dev}
    found = {
        "first": [case for case in dev if case.kind == "noisy"],
        "second": [
            case
            for case in other_cases(folder / "labels_noisy2.jsonl", folder / "noisy2", "noisy2")
            if case.program in programs
        ],
        "foreign": [
            one
            for case in (*with_root_lines(dev), *recorded)
            for one in foreign_cases(case, work)
        ],
    }  # fmt: skip
    return {name: cases for name, cases in found.items() if cases}


def with_root_lines(dev: Sequence[Case]) -> Iterator[Case]:
    """Yield the clean cases with the root lines of their noisy twins."""
    noisy = {case.program: case for case in dev if case.kind == "noisy"}
    for case in dev:
        if case.kind != "clean" or case.program not in noisy:
            continue
        among = noisy[case.program]
        lines = _lines(among.path)
        roots = {lines[number - 1].strip() for number in among.root_lines}
        numbers = frozenset(
            number
            for number, line in enumerate(_lines(case.path), 1)
            if line.strip() and any(root.endswith(line.strip()) for root in roots)
        )
        yield replace(case, root_lines=numbers)


def foreign_cases(case: Case, work: Path) -> Iterator[Case]:
    """Yield `case` within the foreign make, with the cascade before and after it."""
    lines = _lines(case.path)
    # The case's own steps after thousands of the other job's would suggest a restart.
    kept = [
        number
        for number, line in enumerate(lines, 1)
        if number in case.root_lines or reported_step(clean_line(line.encode(), 0).text) is None
    ]
    for way, cascade_first in _WAYS:
        name = f"{case.id.replace('/', '.')}.foreign.{way.replace(' ', '_')}"
        made = surround([lines[number - 1] for number in kept], name, cascade_first=cascade_first)
        path = work / f"{name}.log"
        path.write_text("".join(line.text + "\n" for line in made), encoding="utf-8")
        roots = frozenset(
            number
            for number, line in enumerate(made, 1)
            if line.origin and kept[line.origin - 1] in case.root_lines
        )
        yield replace(
            case, id=name, path=path, kind="foreign", root_lines=roots, cascade_first=cascade_first
        )


def make_rows(name: str, judged: Judged) -> Iterator[Row]:
    """Yield the rows of one make: Holdfast beside the patterns, then its confidence."""
    for way, cascade_first in _WAYS:
        cases = [case for case in judged.cases if case.cascade_first is cascade_first]
        yield _row(judged, f"{name} make, {way}: reason", cases, reason_right, _MUSTS[name])
    yield _row(judged, f"{name} make: reason", judged.cases, reason_right, _MUSTS[name])
    for what, judge, must in _JUDGES:
        yield _row(judged, f"{name} make: {what}", judged.cases, judge, must)
    said = confidences(judged.cases, judged.ours)
    wrong = confident_and_wrong(said)
    yield Row(
        measure=f"{name} make: confident (0.8) and wrong ({wrong.right} of {wrong.of})",
        ours=wrong.share,
        unit="",
        must=Must("<=", 0.03),
    )
    calibrates = name == CALIBRATING
    yield Row(
        measure=f"{name} make: expected calibration error, {BINS} bins, {len(said)} logs"
        + " [it calibrates]" * calibrates,
        ours=calibration_error(said),
        unit="",
        must=None if calibrates else Must("<=", 0.08),
    )


def _row(judged: Judged, what: str, cases: Sequence[Case], judge: Judge, must: float) -> Row:
    ours = tally(cases, judged.ours, judge)
    theirs = tally(cases, judged.peers.get(BASELINE, {}), judge)
    return Row(
        measure=f"{what} ({ours.right} of {ours.of}) [{BASELINE}]",
        ours=ours.share,
        peer=theirs.share,
        unit="",
        must=Must(">=", must) if ours.of else None,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")
