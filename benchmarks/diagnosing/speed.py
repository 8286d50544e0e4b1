"""Measure the time and memory from a path to an answer on one core, with the peers in turn."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.jobs import DoesNotWork, say
from common.machine import Quiet
from common.table import Must, Row
from diagnosing import nvrx
from diagnosing.baselines import BASELINES
from diagnosing.big_log import GUILTY, REASON, BigLog, write_big_log
from diagnosing.systems import PEER

MB: Final = 1e6
ROOM_LEFT_BYTES: Final = 5_000_000_000
OURS, READ = "holdfast", "read"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the generated logs."""

    big_bytes: int
    """The log for Holdfast alone, once."""
    beside_bytes: int
    """The log for all systems, in turn."""


FULL: Final = Sizes(big_bytes=10_000_000_000, beside_bytes=100_000_000)
QUICK: Final = Sizes(big_bytes=10_000_000, beside_bytes=1_000_000)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One system's run over one log."""

    cpu_s: float
    """CPU time of the process and of the children that it waited for."""
    wall_s: float
    rss_mb: float
    answer: dict[str, Any]


def rows(
    folder: Path, quiet: Quiet, checkout: Path | None, *, quick: bool, rounds: int, seed: int
) -> Iterator[Row]:
    """Yield Holdfast's speed on a large log, and all systems' speed on a smaller one."""
    sizes = QUICK if quick else FULL
    yield from _beside(folder, quiet, checkout, sizes.beside_bytes, rounds, seed)
    needed = sizes.big_bytes + ROOM_LEFT_BYTES
    if shutil.disk_usage(folder).free < needed:
        raise DoesNotWork(
            f"{folder} has no room for {needed / 1e9:.0f} GB; set TMPDIR to a folder that has"
        )
    say(f"writing {sizes.big_bytes / 1e9:g} GB")
    log = write_big_log(folder / "big.log", sizes.big_bytes, seed)
    try:
        yield from _alone(log, quiet, checkout)
    finally:
        log.path.unlink()


def _alone(log: BigLog, quiet: Quiet, checkout: Path | None) -> Iterator[Row]:
    size = f"{log.size_bytes / 1e9:.3g} GB"
    quiet.wait()
    read = run_on(READ, log.path, checkout)
    quiet.wait()
    ours = run_on(OURS, log.path, checkout)
    megabytes = log.size_bytes / MB
    yield Row(
        measure=f"speed of one core, {size}, by CPU time [limit: reads it, counts lines]",
        ours=megabytes / ours.cpu_s, limit=megabytes / read.cpu_s, unit="MB/s", must=Must(">=", 15),
    )  # fmt: skip
    yield Row(
        measure=f"speed of one core, {size}, by the clock [limit: likewise]",
        ours=megabytes / ours.wall_s, limit=megabytes / read.wall_s, unit="MB/s",
    )  # fmt: skip
    yield Row(
        measure=f"most memory, {size} [limit: reads it]", ours=ours.rss_mb, limit=read.rss_mb, unit="MB",
        must=Must("<=", 300),
    )  # fmt: skip
    yield Row(
        measure=f"its root found, {size}", ours=float(_found(log, ours)), unit="", must=Must("=", 1)
    )


def _found(log: BigLog, run: Run) -> bool:
    cited = {line["line"] for line in run.answer["root_lines"]}
    return (
        run.answer["reason"] == REASON
        and log.root_line in cited
        and run.answer["scope"].get("rank") == GUILTY
    )


def _beside(
    folder: Path, quiet: Quiet, checkout: Path | None, size_bytes: int, rounds: int, seed: int
) -> Iterator[Row]:
    log = write_big_log(folder / "beside.log", size_bytes, seed)
    names = [OURS, *(["nvrx"] if nvrx.missing(checkout) is None else []), *BASELINES, READ]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            quiet.wait()
            runs[name].append(run_on(name, log.path, checkout))
        say(f"speed: round {number + 1} of {rounds}")
    log.path.unlink()
    speeds = {
        name: log.size_bytes / MB / statistics.median(run.cpu_s for run in runs[name])
        for name in names
    }
    memory = {name: max(run.rss_mb for run in runs[name]) for name in names}
    size = f"{log.size_bytes / MB:.0f} MB"
    for name in names[1:-1]:
        said = PEER if name == "nvrx" else name
        yield Row(
            measure=f"speed of one core, {size}, by CPU time [{said}]", ours=speeds[OURS], peer=speeds[name],
            limit=speeds[READ], unit="MB/s",
        )  # fmt: skip
        if name == "nvrx":
            yield Row(
                measure=f"most memory, {size} [{said}]", ours=memory[OURS], peer=memory[name], limit=memory[READ],
                unit="MB",
            )  # fmt: skip


def run_on(system: str, log: Path, checkout: Path | None) -> Run:
    """Run one system on one log in a process with one core.

    Raises:
        DoesNotWork: the system failed or gave no answer.
    """
    command = [sys.executable, "-m", "diagnosing.one_log", system, str(log.resolve())]
    core = min(os.sched_getaffinity(0))
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("wb") as output, err.open("wb") as errors:
        began_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=nvrx.environment(checkout),
        )
        try:
            os.sched_setaffinity(process.pid, {core})
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_s = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
    answers, said = _objects(out.read_text().splitlines()), err.read_text()
    if process.returncode or not answers:
        raise DoesNotWork(f"{system} left with {process.returncode} on {log}:\n{said[-2000:]}")
    peak_kib = int(said.split()[-1])
    return Run(
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=wall_s,
        rss_mb=peak_kib * 1024 / MB,
        answer=answers[-1],
    )


def _objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]
