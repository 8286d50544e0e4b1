"""Run programs and store their logs with labels.

A folder gets `clean/ID.log`; under torchrun also `ranks/ID/rank-N.log` and `launcher.log`; and
`labels.jsonl` with one object per line: `Program.label` with `id` and `root_lines`, the 1-based
root lines of the log.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from failure_lab.place import CannotRun
from failure_lab.program import Program
from failure_lab.run import Recording, run

AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one program."""

    program: str
    problem: str | None = None
    """Why the log is missing or wrong; None if the program was recorded."""
    skipped: bool = False
    """The machine cannot run it."""
    wall_s: float = 0.0


def record(
    programs: Iterable[Program],
    folder: Path,
    *,
    at_once: int = AT_ONCE,
    runner: Callable[[Program], Recording] = run,
) -> Iterator[Outcome]:
    """Run `programs`, `at_once` at a time, and store each log as soon as it is complete."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = {pool.submit(runner, program): program for program in programs}
        try:
            for done in as_completed(waiting):
                yield _outcome(waiting[done], done, folder)
        finally:
            pool.shutdown(
                cancel_futures=True
            )  # of what is interrupted, only the runs under way are waited for


def _outcome(program: Program, done: "Future[Recording]", folder: Path) -> Outcome:
    try:
        recording = done.result()
    except CannotRun as error:
        return Outcome(program=program.id, problem=str(error), skipped=True)
    problem = _problem(program, recording)
    if problem is None:
        _keep(program, recording, folder)
    else:
        _write(folder / "rejected" / f"{program.id}.log", recording.log)
    return Outcome(program=program.id, problem=problem, wall_s=recording.wall_s)


def root_lines(program: Program, log: str) -> list[int]:
    """Return the 1-based lines of `log` that state the root."""
    root = re.compile(program.root)
    return [number for number, line in enumerate(log.split("\n"), 1) if root.search(line)]


def read_labels(folder: Path) -> list[dict[str, Any]]:
    """Return the labels of `folder`; an empty list if it has none."""
    path = folder / "labels.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_labels(folder: Path, labels: Iterable[dict[str, Any]]) -> None:
    """Replace the labels of `folder`, in the order of their ids."""
    in_order = sorted(labels, key=lambda label: label["id"])
    _write(folder / "labels.jsonl", "".join(json.dumps(label) + "\n" for label in in_order))


def _problem(program: Program, recording: Recording) -> str | None:
    if recording.timed_out:
        return f"it did not end within {program.limit_s:.0f} s"
    if recording.exit_code == 0:
        return "it ended well"
    if not root_lines(program, recording.log):
        return f"no line of it matches {program.root!r}"
    return None


def _keep(program: Program, recording: Recording, folder: Path) -> None:
    _write(folder / "clean" / f"{program.id}.log", recording.log)
    for rank, text in recording.ranks.items():
        _write(folder / "ranks" / program.id / f"rank-{rank}.log", text)
    if recording.ranks:
        _write(folder / "ranks" / program.id / "launcher.log", recording.launcher)
    label = {"id": program.id, **program.label(), "root_lines": root_lines(program, recording.log)}
    write_labels(folder, [label, *(one for one in read_labels(folder) if one["id"] != program.id)])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
