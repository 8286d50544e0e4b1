"""Run hostile programs in the real sandbox, with harmless ones between, beside a bare interpreter.

Programs run one at a time. A program that runs into its time limit takes the whole limit. Such
programs have a short limit (`hostile_programs.TIME_LIMIT_S`) and count like the others.
"""

import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from evaluation.hostile_programs import HOSTILE, TIME_LIMIT_S
from evaluation.hostile_trials import LIMITS, Outside, outside
from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.sandbox.sandbox import Sandbox

HARMLESS_EVERY = 8
HARMLESS, ITS_TESTS = "def f(x): return x * x\n", "assert f(3) == 9\n"
LEAST, MAX_MS = 40, 100
FORKS = 200
FORK = """
import os, sys, time
took_s = []
for _ in range(int(sys.argv[1])):
    began_s = time.perf_counter()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    took_s.append(time.perf_counter() - began_s)
print(sorted(took_s)[len(took_s) // 2])
"""


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield the contained programs and the time per program; one row if no sandbox is permitted."""
    del folder
    with outside() as world:
        try:
            sandbox = Sandbox(1, LIMITS)
        except BadUse as error:
            say(f"No hostile program was run. {error}")
            yield Row(measure="hostile programs contained: this machine permits no sandbox", unit="programs",
                      must=None if quick else Must(">=", LEAST))  # fmt: skip
            return
        with sandbox:
            yield from _rows_of(sandbox, world, quiet, quick=quick, rounds=rounds, seed=seed)


def _rows_of(
    sandbox: Sandbox, world: Outside, quiet: Quiet, *, quick: bool, rounds: int, seed: int
) -> Iterator[Row]:
    programs = [one for one in HOSTILE if sandbox.protection.namespaces or not one.needs_namespaces]
    if len(programs) < len(HOSTILE):
        left_out = " and ".join(repr(one.name) for one in HOSTILE if one.needs_namespaces)
        say(
            f"Namespaces are not permitted here: {left_out} are left out, since only each file alone is bounded."
        )
    if quick:
        programs = programs[::2]
    order, failed = random.Random(f"{seed} hostile"), Counter[str]()
    mean_ms, harmless_ms, bare_ms, fork_ms = [], [], [], []
    for number in range(rounds):
        quiet.wait()
        order.shuffle(programs)
        took_s = []
        for place, program in enumerate(programs):
            trial = world.try_out(sandbox, program)
            took_s.append(trial.verdict.seconds)
            if trial.faults:
                failed[program.name] += 1
                say(f"NOT CONTAINED: {program.name}: {'; '.join(trial.faults)}")
            if place % HARMLESS_EVERY == 0:
                harmless_ms.append(_harmless_ms(sandbox))
                bare_ms.append(_bare_ms())
        mean_ms.append(1000 * statistics.fmean(took_s))
        fork_ms.append(_fork_ms())
        say(
            f"round {number + 1} of {rounds}: {len(programs)} hostile programs, {mean_ms[-1]:.0f} ms each"
        )
    limited = sum(one.wall_s is not None for one in programs)
    right, bare, fork = (
        len(programs) - len(failed),
        statistics.median(bare_ms),
        statistics.median(fork_ms),
    )
    yield Row(measure=f"hostile programs tried, {limited} of them until their time limit of {TIME_LIMIT_S:g} s",
              ours=len(programs), limit=len(HOSTILE), unit="programs", must=Must(">=", LEAST))  # fmt: skip
    yield Row(measure="hostile programs contained, with the right verdict, in every round", ours=right,
              limit=len(programs), unit="programs", must=Must("=", len(programs)))  # fmt: skip
    yield Row(measure="a hostile program from call to verdict, mean (limit: a bare fork)",
              ours=statistics.median(mean_ms), limit=fork, unit="ms",
              must=None if quick else Must("<=", MAX_MS))  # fmt: skip
    yield Row(measure="a harmless program from call to verdict, median (peer: a bare interpreter; limit: a bare fork)",
              ours=statistics.median(harmless_ms), peer=bare, limit=fork, unit="ms")  # fmt: skip


def _harmless_ms(sandbox: Sandbox) -> float:
    verdict = sandbox.run(HARMLESS, ITS_TESTS)
    if not verdict.passed:
        raise RuntimeError(f"a harmless program was judged {verdict.reason!r}")
    return 1000 * verdict.seconds


def _bare_ms() -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", HARMLESS + ITS_TESTS], check=True)
    return 1000 * (time.perf_counter() - began_s)


def _fork_ms() -> float:
    """Return the median time of a fork of a small process and its end."""
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", FORK, str(FORKS)], check=True, capture_output=True
    )
    return 1000 * float(said.stdout)
