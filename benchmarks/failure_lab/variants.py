"""Derive from a recorded log the logs that the failure might have left elsewhere, with labels.

| variant | change of the log |
|---|---|
| `permuted` | the ranks' logs one after another, in another order, the launcher's last |
| `ranks64` | 64 ranks: a faulty rank once, its peers copied, every line with its rank |
| `unprefixed` | without the ranks before the lines |
| `untimed` | without dates and times |
| `tail_cut` | it ends with the first lines of the root |
| `root_removed` | without the lines of the root: confidence must fall |
| `noisy` | after some 1,500 lines of a healthy job; in half of them the cascade comes first |

A variant that would equal the recorded log is left out.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from failure_lab import noise
from failure_lab.dialects import DIALECTS
from failure_lab.program import Program
from failure_lab.programs import PROGRAMS
from failure_lab.record import read_labels, write_labels
from failure_lab.routines import NOISE

NOISE_LINES = 1500
RANKS = 64

_RANK_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?)+")
_RANK_WITHIN = re.compile(r"\[[Rr]ank \d+\]")
_TIME = re.compile(
    r"\[? ?\b\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?\]? ?"  # 2025-05-06 11:48:03,310
    r"|\b[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+ "  # [E1206 18:44:12.715298746, and torchrun's W1122 06:22:10.123000
    r"|(?:^|(?<=\]:)|(?<=kernel: ))(?:"
    r"\[ *\d+\.\d{6}\] "  # the kernel's seconds
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )"  # the system log's
)
_PROGRESS = re.compile("|".join(dialect.progress for dialect in DIALECTS.values()))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log, and whether it states the root."""

    text: str
    root: bool = False


Lines = tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded log with its label."""

    program: Program
    label: Mapping[str, Any]
    lines: Lines
    ranks: Mapping[int, Lines]
    """The log of each rank; the whole log as rank 0 if no launcher marked the ranks."""
    launcher: Lines


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A log made from a recorded one."""

    name: str
    lines: Lines
    changes: Mapping[str, Any]
    """The differences of its label."""


def variants(recorded: Recorded, seed: int = 0) -> Iterator[Variant]:
    """Yield every variant that differs from `recorded`; equal seeds give equal variants."""
    for name, make in _MAKERS.items():
        draw = random.Random(f"{seed}/{recorded.program.id}/{name}")
        lines, changes = make(recorded, draw)
        if [line.text for line in lines] != [line.text for line in recorded.lines]:
            yield Variant(name=name, lines=lines, changes=changes)


def label_of(recorded: Recorded, variant: Variant) -> dict[str, Any]:
    """Return the label of `variant`: the program's, with the new root lines."""
    found = [number for number, line in enumerate(variant.lines, 1) if line.root]
    return {
        **recorded.label,
        "id": f"{recorded.program.id}.{variant.name}",
        "variant": variant.name,
        "log": f"{variant.name}/{recorded.program.id}.log",
        "root_lines": found,
        **variant.changes,
    }


def read_recorded(folder: Path) -> Iterator[Recorded]:
    """Yield the recordings in `folder`; skip a log whose program is gone."""
    for label in read_labels(folder):
        if (program := PROGRAMS.get(label["program"])) is None:
            continue
        lines = _lines(folder / "clean" / f"{program.id}.log", program)
        own = folder / "ranks" / program.id
        ranks = {
            int(path.stem.removeprefix("rank-")): _lines(path, program)
            for path in sorted(own.glob("rank-*.log"))
        }
        launcher = _lines(own / "launcher.log", program) if ranks else ()
        yield Recorded(
            program=program, label=label, lines=lines, ranks=ranks or {0: lines}, launcher=launcher
        )


def write_variants(recorded_in: Path, folder: Path, seed: int = 0) -> int:
    """Make all variants of the logs in `recorded_in` with their labels; return the number."""
    labels = []
    for recorded in read_recorded(recorded_in):
        for variant in variants(recorded, seed):
            label = label_of(recorded, variant)
            path = folder / label["log"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(line.text + "\n" for line in variant.lines), encoding="utf-8", newline=""
            )
            labels.append(label)
    write_labels(folder, labels)
    return len(labels)


def _lines(path: Path, program: Program) -> Lines:
    root = re.compile(program.root)
    text = path.read_bytes().decode("utf-8", "replace").removesuffix("\n")
    return tuple(Line(line, bool(root.search(line))) for line in text.split("\n"))


Made = tuple[Lines, Mapping[str, Any]]


def _permuted(recorded: Recorded, draw: random.Random) -> Made:
    order = list(recorded.ranks)
    draw.shuffle(order)
    given = recorded.program.prefix
    lines = []
    for rank in order:
        prefix = given.replace("${rank}", str(rank)).replace("${local_rank}", str(rank))
        lines += [replace(line, text=prefix + line.text) for line in recorded.ranks[rank]]
    return (*lines, *recorded.launcher), {}


def _ranks64(recorded: Recorded, draw: random.Random) -> Made:
    faulty = dict(recorded.label["faulty"] or {})
    guilty = faulty.get("rank")
    sources = [rank for rank in recorded.ranks if rank != guilty] or list(recorded.ranks)
    copies = {rank: sources[rank % len(sources)] for rank in range(RANKS)}
    changes: dict[str, Any] = {}
    if guilty is not None and guilty in recorded.ranks and len(recorded.ranks) > 1:
        chosen = draw.randrange(RANKS)
        copies[chosen] = guilty
        changes["faulty"] = {**faulty, "rank": chosen}
    streams = [
        [_of_rank(line, rank) for line in recorded.ranks[source]] for rank, source in copies.items()
    ]
    return (*_merged(streams, draw), *recorded.launcher), changes


def _of_rank(line: Line, rank: int) -> Line:
    text = _RANK_WITHIN.sub(f"[Rank {rank}]", _RANK_PREFIX.sub("", line.text))
    return replace(line, text=f"[rank{rank}]: {text}")


def _merged(streams: Sequence[list[Line]], draw: random.Random) -> list[Line]:
    """Merge the streams line by line, each in its order, as ranks that step together print."""
    placed = [
        ((number + draw.random()) / len(stream), which, number, line)
        for which, stream in enumerate(streams)
        for number, line in enumerate(stream)
    ]
    return [line for _, _, _, line in sorted(placed, key=lambda one: one[:3])]


def _unprefixed(recorded: Recorded, draw: random.Random) -> Made:  # noqa: ARG001
    return tuple(replace(line, text=_RANK_PREFIX.sub("", line.text)) for line in recorded.lines), {}


def _untimed(recorded: Recorded, draw: random.Random) -> Made:  # noqa: ARG001
    return tuple(replace(line, text=_TIME.sub("", line.text)) for line in recorded.lines), {}


def _tail_cut(recorded: Recorded, draw: random.Random) -> Made:  # noqa: ARG001
    lines = recorded.lines
    end = next(number for number, line in enumerate(lines) if line.root)
    while end < len(lines) and lines[end].root:
        end += 1
    return lines[:end], {}


def _root_removed(recorded: Recorded, draw: random.Random) -> Made:  # noqa: ARG001
    return tuple(line for line in recorded.lines if not line.root), {"root_removed": True}


def _noisy(recorded: Recorded, draw: random.Random) -> Made:
    trainer = (
        recorded.program.dialect if recorded.program.dialect in NOISE else draw.choice(list(NOISE))
    )
    assert trainer is not None
    before = [
        Line(text) for text in noise.routine(trainer, draw, NOISE_LINES + draw.randrange(-40, 40))
    ]
    down = [Line(text) for text in noise.cascade(draw, step=700)]
    # Its own first steps, after hundreds of the noise's, would tell of a restart that never was.
    failure = [line for line in recorded.lines if line.root or not _PROGRESS.search(line.text)]
    first = draw.random() < 0.5
    lines = [*before, *down, *failure] if first else [*before, *failure, *down]
    return tuple(lines), {"cascade_before_root": first}


_MAKERS: Mapping[str, Callable[[Recorded, random.Random], Made]] = {
    "permuted": _permuted,
    "ranks64": _ranks64,
    "unprefixed": _unprefixed,
    "untimed": _untimed,
    "tail_cut": _tail_cut,
    "root_removed": _root_removed,
    "noisy": _noisy,
}
VARIANTS = tuple(_MAKERS)
