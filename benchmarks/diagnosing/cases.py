"""Read labelled logs: the dev cases, and the laboratory's recordings with their variants."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.jobs import DoesNotWork, say

QUICK_PROGRAMS = 4
DEV_KINDS = ("clean", "noisy")
"""The kinds of each development case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job's log and its label."""

    id: str
    path: Path
    """A log, or a folder with one log per rank."""
    kind: str
    """`clean` or `noisy` (dev cases); `recorded`, `ranks` or a variant's name (laboratory)."""
    reason: str
    accepted: frozenset[str]
    category: str
    root_lines: frozenset[int] = frozenset()
    """1-based root lines; empty if unknown or removed: then cited lines are not scored."""
    faulty: Mapping[str, Any] = field(default_factory=dict)
    """The faulty rank, node or GPU if the log names it; else empty, and scope is not scored."""
    restart_helps: bool | None = None
    """None: undecided even for a person who knows the case."""
    cascade_first: bool | None = None
    program: str = ""
    root_removed: bool = False


def dev_cases(folder: Path) -> list[Case]:
    """The development cases, each alone (`clean`) and among routine output (`noisy`)."""
    found = []
    for label in _labels(folder):
        for kind in DEV_KINDS:
            noisy = kind == "noisy"
            found.append(
                _case(
                    label,
                    id=f"{label['id']}/{kind}",
                    path=folder / kind / f"{label['id']}.log",
                    kind=kind,
                    root_lines=frozenset(label["noisy_root_lines"] if noisy else ()),
                    faulty=label["faulty"] or {},
                    cascade_first=label["noisy_cascade_before_root"] if noisy else None,
                )
            )
    return found


def other_cases(labels: Path, logs: Path, kind: str) -> list[Case]:
    """Return the labelled logs of a folder, such as other noise or public threads.

    Returns:
        An empty list without labels.
    """
    if not labels.exists():
        return []
    return [
        _case(
            label,
            id=f"{label['id']}/{kind}",
            path=logs / f"{label['id']}.log",
            kind=kind,
            root_lines=frozenset(label["root_lines"]),
            faulty=label["faulty"] or {},
            cascade_first=label.get("cascade_before", False),
        )
        for label in _label_lines(labels)
    ]


def lab_cases(recorded: Path, variants: Path) -> list[Case]:
    """Return the laboratory's logs as recorded, also by rank under torchrun, and their variants."""
    found = []
    for label in _labels(recorded):
        log = recorded / "clean" / f"{label['id']}.log"
        roots = frozenset(label["root_lines"])
        found.append(
            _case(
                label,
                id=label["id"],
                path=log,
                kind="recorded",
                root_lines=roots,
                faulty=_named(label, log),
            )
        )
        ranks = recorded / "ranks" / label["id"]
        if ranks.is_dir():  # file names have the rank, so that each log names the fault
            found.append(
                _case(
                    label,
                    id=f"{label['id']}.ranks",
                    path=ranks,
                    kind="ranks",
                    faulty=label["faulty"] or {},
                )
            )
    for label in _labels(variants):
        log, removed = variants / label["log"], bool(label.get("root_removed"))
        found.append(
            _case(
                label,
                id=label["id"],
                path=log,
                kind=label["variant"],
                root_lines=frozenset(label["root_lines"]),
                faulty={} if removed else _named(label, log),
                cascade_first=label.get("cascade_before_root"),
                root_removed=removed,
            )
        )
    return found


def _case(label: Mapping[str, Any], **known: Any) -> Case:
    helps = label["recoverable_by_restart"]
    return Case(
        reason=label["reason"],
        accepted=frozenset(label["accept_reasons"]),
        category=label["category"],
        restart_helps=helps if isinstance(helps, bool) else None,
        program=label.get("program", label["id"]),
        **known,
    )


def _labels(folder: Path) -> list[dict[str, Any]]:
    return _label_lines(folder / "labels.jsonl")


def _label_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _named(label: Mapping[str, Any], log: Path) -> Mapping[str, Any]:
    """Return the part of the fault that the log's text names; prefixes may be stripped."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return {key: value for key, value in (label["faulty"] or {}).items() if names(text, key, value)}


def names(text: str, key: str, value: object) -> bool:
    """Return True if a text names the rank, the node or the GPU.

    Forms of a rank are `[rank1]:`, `Rank 1`, `rank : 1` and `[default1]`.
    """
    if key in {"rank", "local_rank"}:
        return re.search(rf"(?i)(?:rank|default)[\s:=_\[\]#-]{{0,16}}{value}\b", text) is not None
    return str(value).lower() in text.lower()


def places(cases: Iterable[Case]) -> dict[str, int]:
    """Return each program's place among the programs of its reason, from 0, by names alone."""
    by_reason: dict[str, set[str]] = {}
    for case in cases:
        by_reason.setdefault(case.reason, set()).add(case.program)
    return {
        program: place
        for programs in by_reason.values()
        for place, program in enumerate(
            sorted(programs, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        )
    }


def laboratory(kept: Path | None, work: Path, *, quick: bool, seed: int) -> list[Case]:
    """Return the laboratory's cases, recorded anew or read from the folder `kept`.

    Raises:
        DoesNotWork: nothing could be recorded.
    """
    from failure_lab.programs import PROGRAMS
    from failure_lab.record import record
    from failure_lab.variants import write_variants

    recorded = kept or work / "lab"
    if not (recorded / "labels.jsonl").exists():
        chosen = list(_cheap(PROGRAMS.values()) if quick else PROGRAMS.values())
        for number, outcome in enumerate(record(chosen, recorded), 1):
            say(f"recorded {number}/{len(chosen)}: {outcome.program} {outcome.problem or ''}")
        if not (recorded / "labels.jsonl").exists():
            raise DoesNotWork(
                "the laboratory recorded nothing; run PYTHONPATH=benchmarks python -m failure_lab record --out DIR"
            )
    variants = work / "variants"
    shutil.rmtree(variants, ignore_errors=True)
    write_variants(recorded, variants, seed)
    return lab_cases(recorded, variants)


def _cheap(programs: Iterable[Any]) -> Iterator[Any]:
    """Yield a few programs without torch, each with another reason."""
    seen: set[str] = set()
    for program in programs:
        if (
            program.launcher != "torchrun"
            and program.dialect is None
            and program.reason not in seen
        ):
            seen.add(program.reason)
            yield program
            if len(seen) == QUICK_PROGRAMS:
                return


def of_kind(cases: Sequence[Case], *kinds: str) -> list[Case]:
    """Return the cases of the kinds; without kinds, all cases."""
    return [case for case in cases if not kinds or case.kind in kinds]
