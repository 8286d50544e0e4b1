"""Kill the processes of a supervised training again and again, and check that every bit ends as in an undisturbed run.

Each run is `holdfast run` of two gloo ranks (`workers/chaos_training.py`: DDP, BatchNorm, a queue of features and the
counters of balanced experts written in forward, dropout, AdamW). One process after the other gets SIGKILL: a rank, the
launcher, or the process that writes a rank's checkpoints. Of four kills, three come at a random moment of a random
step, training or saving. One kill comes within seconds of such a kill, while the job starts again. No two kills in a
row meet a start: a supervisor may take that for a job that cannot start.

At the end, the weights, optimizer state, schedule and random generators of both ranks are compared bit for bit with a
run of the same script under plain torchrun, without Holdfast, checkpoints or kills. The buffers of rank 0, which DDP
gives to all ranks, are compared as well. Where the command gives up, `holdfast run --resume` continues the run, and the
benchmark counts a person, who would have had to resume the run. There is no peer: torchrun does not survive its own
death. The exit status is 1 if a must is not met.
"""

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from common.jobs import (
    HOLDFAST,
    POLL_S,
    TORCHRUN,
    WORKERS,
    DoesNotWork,
    adopt_orphans,
    job,
    last_words,
    say,
    wait_until,
)
from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, print_table, report
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url

if TYPE_CHECKING:
    from subprocess import Popen

SCRIPT = str(WORKERS / "chaos_training.py")
WORLD_SIZE = 2
RUNS, KILLS = 5, 40
QUICK_RUNS, QUICK_KILLS = 1, 2
SAVE_EVERY = 5
STEPS_A_KILL = 15
"""Steps for each kill: a checkpoint comes between two kills, which are at least two thirds of this number apart."""
LAST_STEPS = 10
START_S = 3.0
"""Seconds within which a kill that is to meet a start comes: at most the time from a kill to the first new step."""
PATIENCE_S = 400.0
"""Seconds without a new step after which a run is given up. The longest wait before a restart is 300 s."""
PEOPLE = 20
"""Limit for the people that a run needs; a run that needs more of them is given up."""
VICTIMS = {"rank": 5, "launcher": 2, "writing process": 3}
"""The number of kills of each kind of process, of ten kills."""
DEADLY = {name: VICTIMS[name] for name in ("rank", "launcher")}
"""The victims after which the job is restarted; the rank itself restarts a writing process."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A kill that is to come: once `at_step` is reached, or at once, and then after `wait_s`."""

    victim: str
    at_step: int | None
    wait_s: float
    draw: float
    """The choice among several victims, from 0 to 1."""


@dataclass(kw_only=True)
class FaultedRun:
    """The results of one run."""

    seed: int
    steps: int
    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    people: list[str] = field(default_factory=list)
    """The reason for each time that the command gave up."""
    steps_again: int = 0
    differing: list[str] | None = None
    """The differences from the undisturbed run, by rank and name; None: the run did not come to its end."""
    wall_s: float = 0.0

    @property
    def is_identical(self) -> bool:
        """Return whether the run ended with the same bits."""
        return self.differing == []


def plan(kills: int, source: random.Random) -> tuple[list[Blow], int]:
    """Return the kills of a run, and the number of its steps."""
    blows: list[Blow] = []
    at_step = 0
    for number in range(kills):
        meets_start = number % 4 == 1
        precedes_start = number % 4 == 0
        if not meets_start:
            at_step += STEPS_A_KILL
        chances = DEADLY if precedes_start else VICTIMS
        blows.append(
            Blow(
                victim=source.choices([*chances], [*chances.values()])[0],
                at_step=None if meets_start else at_step - source.randrange(STEPS_A_KILL // 3),
                wait_s=source.uniform(0.0, START_S if meets_start else 0.2),
                draw=source.random(),
            )
        )
    return blows, at_step + LAST_STEPS


def victims() -> dict[str, list[psutil.Process]]:
    """Return the living processes of the job, by kind."""
    found: dict[str, list[psutil.Process]] = {name: [] for name in VICTIMS}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if words[1:2] == [SCRIPT]:
                found["rank"].append(process)
            elif words[1:3] == [*TORCHRUN[1:]]:
                found["launcher"].append(process)
            elif "holdfast.checkpoint.writer.process" in words:
                found["writing process"].append(process)
    return found


def newest_step(folder: Path) -> int:
    """Return the highest step that rank 0 has completed, in any attempt."""
    return max((step for _pid, step in journal(folder)), default=0)


def journal(folder: Path) -> list[tuple[int, int]]:
    """Return the process and the step, for each step that rank 0 has completed."""
    path = folder / "steps-0.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    # A line that a kill has cut in two is joined with the next.
    return [(int(words[0]), int(words[1])) for words in map(str.split, lines) if len(words) == 2]


class Run:
    """One run under kills, with a person beside it who only ever resumes the run."""

    def __init__(self, folder: Path, faulted: FaultedRun) -> None:
        self._folder = folder
        self._faulted = faulted
        self._process: Popen[bytes] | None = None

    def conduct(self, blows: Sequence[Blow]) -> None:
        """Start the run, strike it, and wait for its end.

        Raises:
            DoesNotWork: the run does not come to its end.
        """
        worker = (sys.executable, SCRIPT, str(self._faulted.steps), "--save-every", str(SAVE_EVERY))
        start = (
            *HOLDFAST,
            "run",
            "--name",
            "r",
            "--no-echo",
            "--nproc",
            str(WORLD_SIZE),
            "--",
            *worker,
        )
        waiting = list(blows)
        while True:
            with job(start, self._folder) as self._process:
                while waiting and self._strike(waiting[0]):
                    del waiting[0]
                self._wait(lambda: False)  # until the command ends
                code = self._process.wait()
            if code == 0:
                return
            self._faulted.people.append(f"exit code {code}: {last_words(self._folder, 1)}")
            say(
                f"seed {self._faulted.seed}, at step {newest_step(self._folder)}: {self._faulted.people[-1]}"
            )
            if len(self._faulted.people) > PEOPLE:
                raise DoesNotWork(f"it needed a person more than {PEOPLE} times")
            start = (*HOLDFAST, "run", "--no-echo", "--resume", "r")

    def _strike(self, blow: Blow) -> bool:
        """Kill a process; return False if the command has ended before.

        Raises:
            DoesNotWork: there is no step, or no process to kill, for too long.
        """
        if blow.at_step is not None and not self._wait(
            lambda: newest_step(self._folder) >= (blow.at_step or 0)
        ):
            return False
        time.sleep(blow.wait_s)
        until_s = time.monotonic() + PATIENCE_S
        while self._is_running():
            if time.monotonic() > until_s:
                raise DoesNotWork(f"no process of the job for {PATIENCE_S:.0f} s")
            living = victims()
            kind = (
                blow.victim
                if living[blow.victim]
                else next((name for name in VICTIMS if living[name]), None)
            )
            if kind is None:  # no victim is there yet, or any more
                time.sleep(0.02)
                continue
            victim = living[kind][int(blow.draw * len(living[kind]))]
            with suppress(psutil.NoSuchProcess):  # the victim has just ended by itself
                victim.send_signal(signal.SIGKILL)
                self._faulted.kills[kind] += 1
                return True
        return False

    def _wait(self, holds: Callable[[], bool]) -> bool:
        """Wait until `holds` returns true; return False if the command ends before.

        Raises:
            DoesNotWork: no step is completed for too long.
        """
        done, since_s = 0, time.monotonic()
        while not holds():
            if not self._is_running():
                return False
            if (now_done := len(journal(self._folder))) > done:
                done, since_s = now_done, time.monotonic()
            if time.monotonic() - since_s > PATIENCE_S:
                raise DoesNotWork(
                    f"no step for {PATIENCE_S:.0f} s; the highest is {newest_step(self._folder)}"
                )
            time.sleep(POLL_S)
        return True

    def _is_running(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None


def final_of(folder: Path) -> dict[str, str]:
    """Return the digests of everything that both ranks held in the end, by rank and name."""
    return {
        f"rank {rank}: {name}": digest
        for rank in range(WORLD_SIZE)
        for name, digest in json.loads((folder / f"final-{rank}.json").read_text()).items()
    }


def undisturbed(steps: int) -> tuple[dict[str, str], float]:
    """Return the digests that the script ends with under plain torchrun, and its wall time."""
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as name:
        folder = Path(name)
        command = (
            *TORCHRUN,
            "--standalone",
            f"--nproc-per-node={WORLD_SIZE}",
            SCRIPT,
            str(steps),
            "--bare",
        )
        began_s = time.monotonic()
        with job(command, folder) as process:
            if (
                not wait_until(lambda: process.poll() is not None, timeout_s=PATIENCE_S)
                or process.returncode
            ):
                raise DoesNotWork(f"the script does not train by itself:\n{last_words(folder)}")
        return final_of(folder), time.monotonic() - began_s


def strike(seed: int, kills: int, expected: dict[str, str]) -> FaultedRun:
    """Make one run under kills, and compare its end with `expected`."""
    blows, steps = plan(kills, random.Random(seed))
    faulted = FaultedRun(seed=seed, steps=steps)
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        began_s = time.monotonic()
        try:
            Run(folder, faulted).conduct(blows)
            found = final_of(folder)
            names = sorted(expected.keys() | found.keys())
            faulted.differing = [name for name in names if expected.get(name) != found.get(name)]
        except (DoesNotWork, OSError) as error:
            faulted.people.append(f"given up: {error}")
            say(f"seed {seed}: {error}:\n{last_words(folder)}")
        faulted.wall_s = time.monotonic() - began_s
        steps_done = journal(folder)
        faulted.steps_again = len(steps_done) - len({step for _pid, step in steps_done})
        with suppress(Exception), Ledger.open(ledger_url(folder / ".holdfast")) as ledger:
            faulted.restarts = max(0, len(ledger.attempts("r")) - 1)
    return faulted


def rows_of(all_struck: Sequence[FaultedRun], *, kills: int, alone_s: float) -> list[Row]:
    """Return the rows of all runs together, then each run's wall time."""
    count = len(all_struck)
    struck_kills = sum((one.kills for one in all_struck), Counter[str]())
    return [
        Row(
            measure=f"runs that end bit-identical, of {count}",
            ours=sum(one.is_identical for one in all_struck),
            limit=count,
            unit="runs",
            must=Must("=", count),
        ),
        Row(
            measure="times that a person would have been needed",
            ours=sum(len(one.people) for one in all_struck),
            limit=0,
            unit="",
            must=Must("=", 0),
        ),
        Row(
            measure="kills",
            ours=struck_kills.total(),
            limit=count * kills,
            unit="kills",
            must=Must("=", count * kills),
        ),
        *(
            Row(measure=f"kills of a {victim}", ours=struck_kills[victim], unit="kills")
            for victim in VICTIMS
        ),
        Row(
            measure="restarts of the job",
            ours=sum(one.restarts for one in all_struck),
            unit="restarts",
        ),
        Row(
            measure=f"steps computed again, of {sum(one.steps for one in all_struck)}",
            ours=sum(one.steps_again for one in all_struck),
            unit="steps",
        ),
        *(
            Row(measure=f"seed {one.seed}: wall time", ours=one.wall_s, limit=alone_s, unit="s")
            for one in all_struck
        ),
    ]


def _line(one: FaultedRun) -> tuple[object, ...]:
    ended = "not at its end" if one.differing is None else f"{len(one.differing)} differ"
    return (
        one.seed,
        "identical" if one.is_identical else ended,
        one.kills.total(),
        one.restarts,
        len(one.people),
        one.steps_again,
        f"{one.wall_s:.0f}",
    )


def main() -> int:
    words = {
        "runs": f"under kills, each with a seed of its own (default: {RUNS}; {QUICK_RUNS} if quick)",
        "kills": f"of each run (default: {KILLS}; {QUICK_KILLS} if quick)",
    }
    args = parse_arguments(__doc__ or "", counts=words)
    runs, kills = (
        args.runs or (QUICK_RUNS if args.quick else RUNS),
        args.kills or (QUICK_KILLS if args.quick else KILLS),
    )
    adopt_orphans()
    all_struck = []
    with OthersLoad() as others:
        expected, alone_s = undisturbed(plan(kills, random.Random(args.seed))[1])
        for seed in range(args.seed, args.seed + runs):
            all_struck.append(strike(seed, kills, expected))
            say(f"seed {seed}: {_line(all_struck[-1])[1]}, {all_struck[-1].wall_s:.0f} s")
    columns = ("seed", "the end", "kills", "restarts", "people", "steps again", "wall s")
    print_table(f"{kills} kills a run", columns, [_line(one) for one in all_struck])
    notes = [
        "limit: none of it, and the wall time of the same script under plain torchrun, without checkpoints and kills",
        others.sentence(),
        *(
            f"seed {one.seed}, {n} times: {why}"
            for one in all_struck
            for why, n in Counter(one.people).items()
        ),
        *(
            f"seed {one.seed}: different are {', '.join(one.differing[:8])}"
            for one in all_struck
            if one.differing
        ),
    ]
    rows = rows_of(all_struck, kills=kills, alone_s=alone_s)
    report("Chaos", rows, notes=notes, json_file=args.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
