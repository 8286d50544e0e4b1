"""Seconds from a fault to the first new step: `holdfast run` beside torchrun's own restarts.

Gloo ranks train (`workers/training.py`, the same script with the same Checkpointer for all). A random rank is killed
with SIGKILL, or frozen with SIGSTOP, at a random moment. Moments are those of the signal and of the lines that the
ranks write after each step. The peers are `torchrun --standalone --max-restarts=1000` as it is, and the same with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each restart a store of its own.

A job is struck once right after its start (`cold`), then again each time it has trained for `WARM_S`, as a job of hours
has (`warm`). A job that does not recover ends; the next round starts another one.

The limit of a cold restart is the start of a fresh group without launcher, supervisor or checkpoint, to its first step:
interpreter, `import torch`, gloo, one step. A warm restart has imported everything, so that it has no such limit.
"""

import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.jobs import (
    HOLDFAST,
    TORCHRUN,
    WORKERS,
    DoesNotWork,
    adopt_orphans,
    job,
    last_words,
    say,
    wait_until,
)
from common.machine import OthersLoad, Quiet
from common.table import Must, Row, parse_arguments, report
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url

SCRIPT = str(WORKERS / "training.py")
STEP_S = 0.1
HANG_FLOOR_S = 2.0
HANG_FACTOR = 8.0
START_TIMEOUT_S = 90.0
RECOVERY_BOUND_S = {"SIGKILL": 45.0, "SIGSTOP": 20.0}
"""How long a round waits for a new step; then it counts as not recovered, and everything is killed."""
QUICK_BOUND_S = 15.0
WARM_S = 12.0
"""A job that has trained for so long is warm: 5 s after a first step our processes import what the ranks use."""
STILL_S = 0.2
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A launcher that restarts the job."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def contenders(world_size: int) -> tuple[Contender, Contender, Contender]:
    """Return ours, torchrun as it is, and torchrun with a store of its own for each restart."""
    count = ("--nproc", str(world_size))
    hangs = ("--hang-floor-s", str(HANG_FLOOR_S), "--hang-factor", str(HANG_FACTOR))
    script = (SCRIPT, "--step-s", str(STEP_S))
    ours = (*HOLDFAST, "run", "--name", "r", *count, *hangs, "--", sys.executable, *script)
    restarts = ("--standalone", f"--nproc-per-node={world_size}", "--max-restarts=1000")
    return (
        Contender(name="holdfast", command=ours),
        Contender(name="torchrun, its default store", command=(*TORCHRUN, *restarts, *script)),
        Contender(
            name="torchrun, unshared store",
            command=(*TORCHRUN, *restarts, *script),
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
    )


class Step(NamedTuple):
    """A line that a rank wrote."""

    at_s: float
    pid: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one fault led to. Seconds since the signal; None where it did not come within the bound."""

    first_step_s: float | None
    detected_s: float | None = None
    right_rank: bool = False
    stood_still: bool = False
    """Whether this process itself did not run for `STILL_S` meanwhile: the machine stood still."""


Found = dict[tuple[str, str, str], list[Round]]
"""The rounds of each contender, cold or warm, and of each fault."""


class StandStill:
    """Watches whether the machine lets a thread run that wakes up each 10 ms."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before_s = time.time()
        while True:
            time.sleep(0.01)
            now_s = time.time()
            if now_s - before_s > STILL_S:
                self._gaps.append((before_s, now_s))
            before_s = now_s

    def within(self, began_s: float, ended_s: float) -> bool:
        """Return whether the machine stood still at some moment of a stretch."""
        return any(first_s < ended_s and last_s > began_s for first_s, last_s in self._gaps)


def read_steps(folder: Path, rank: int, *, after: int = 0) -> list[Step]:
    """Return what a rank has written after so many bytes; a line not yet whole is left out."""
    path = folder / f"steps-{rank}.txt"
    if not path.exists():
        return []
    with path.open() as file:
        file.seek(after)
        lines = file.read().split("\n")[:-1]
    return [
        Step(float(at_s), int(pid), int(step))
        for at_s, pid, step in (line.split() for line in lines)
    ]


class Job:
    """A job of one contender that is struck again and again."""

    def __init__(
        self, contender: Contender, world_size: int, folder: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.contender = contender
        self._ranks = range(world_size)
        self._folder = folder
        self._process = process
        self._strikes = 0
        self._read = dict.fromkeys(self._ranks, 0)
        """The bytes of each rank's steps that are of former processes."""

    def _steps(self, rank: int) -> list[Step]:
        return read_steps(self._folder, rank, after=self._read[rank])

    def await_steps(self, pids: set[int], count: int, bound_s: float) -> float | None:
        """Return when each rank had made `count` steps in processes other than `pids`; None after the bound."""

        def steps() -> list[list[Step]]:
            return [
                [step for step in self._steps(rank) if step.pid not in pids] for rank in self._ranks
            ]

        # A launcher that gave up will not bring a new step any more.
        wait_until(
            lambda: all(len(one) >= count for one in steps()) or self._process.poll() is not None,
            timeout_s=bound_s,
        )
        found = steps()
        if any(len(one) < count for one in found):
            return None
        return max(one[count - 1].at_s for one in found)

    def strike(self, fault: str, source: random.Random, still: StandStill, bound_s: float) -> Round:
        """Strike a random rank; wait for a new step of every rank."""
        rank = source.randrange(len(self._ranks))
        time.sleep(source.uniform(0.0, STEP_S))
        steps = {one: self._steps(one) for one in self._ranks}
        self._read = {one: _size(self._folder, one) for one in self._ranks}
        pids = {some[-1].pid for some in steps.values()}
        at_s = time.time()
        os.kill(steps[rank][-1].pid, FAULTS[fault])
        self._strikes += 1
        new_at_s = self.await_steps(pids, 1, bound_s)
        one = Round(
            first_step_s=None if new_at_s is None else new_at_s - at_s,
            stood_still=still.within(at_s, time.time()),
        )
        if self.contender.name != "holdfast":
            return one
        if new_at_s is None:
            say(f"not recovered from {fault} of rank {rank}:\n{last_words(self._folder, 30)}")
        return self._with_ledger(one, fault, rank, at_s)

    def _with_ledger(self, one: Round, fault: str, rank: int, at_s: float) -> Round:
        """Return a round of ours with what our supervisor wrote down."""
        with Ledger.open(ledger_url(self._folder / ".holdfast")) as ledger:
            incidents = ledger.incidents("r")
        if len(incidents) != self._strikes:
            say(f"{len(incidents)} incidents after {self._strikes} faults")
            return one
        incident = incidents[-1]
        kind = "hang" if fault == "SIGSTOP" else "exit"
        return replace(
            one,
            detected_s=incident.detected_at_s - at_s,
            right_rank=(incident.rank, incident.kind) == (rank, kind),
        )


def _size(folder: Path, rank: int) -> int:
    """Return the bytes of whole lines that a rank has written."""
    return (folder / f"steps-{rank}.txt").read_bytes().rfind(b"\n") + 1


@contextmanager
def training(contender: Contender, world_size: int, after_step: int) -> Iterator[Job]:
    """Start a job, and wait until each rank has made so many steps."""
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        with job(contender.command, folder, environment=contender.environment) as process:
            found = Job(contender, world_size, folder, process)
            if found.await_steps(set(), after_step, START_TIMEOUT_S) is None:
                raise DoesNotWork(f"{contender.name} did not train at all:\n{last_words(folder)}")
            yield found


def fresh_start_s(world_size: int = 2) -> float:
    """Return the seconds from starting ranks by hand to their first step."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
        }
        command = (sys.executable, SCRIPT, "--bare")
        began_s = time.time()
        with ExitStack() as stack:
            processes = [
                stack.enter_context(job(command, folder, environment={**common, "RANK": str(rank)}))
                for rank in range(world_size)
            ]

            def trained() -> bool:
                return all(read_steps(folder, rank) for rank in range(world_size))

            def ended() -> bool:
                return any(process.poll() is not None for process in processes)

            wait_until(lambda: trained() or ended(), timeout_s=START_TIMEOUT_S)
            if not trained():
                raise DoesNotWork(
                    f"{SCRIPT} does not train without a launcher:\n{last_words(folder)}"
                )
            return max(read_steps(folder, rank)[0].at_s for rank in range(world_size)) - began_s


class Measurement:
    """All rounds, by contender, in a random order."""

    def __init__(
        self, source: random.Random, quiet: Quiet, *, world_size: int, is_quick: bool
    ) -> None:
        self._source = source
        self._quiet = quiet
        self._world_size = world_size
        self._is_quick = is_quick
        self._still = StandStill()
        self.found: Found = {}
        self.starts_s: list[float] = []

    def fresh_start(self) -> None:
        """Start ranks without a launcher."""
        self._quiet.wait()
        self.starts_s.append(fresh_start_s(self._world_size))
        say(f"fresh start: first step after {self.starts_s[-1]:.2f} s")

    def strike(self, contender: Contender, cold: str, warm: Sequence[str]) -> int:
        """Strike a new job, first by the fault `cold`, then by each of `warm`; return how many of `warm` were made."""
        self._quiet.wait()
        made = 0
        with training(contender, self._world_size, self._source.randrange(6, 16)) as found:
            recovered = self._strike_once(found, COLD, cold)
            for fault in warm if recovered else ():
                time.sleep(WARM_S)
                made += 1
                if not self._strike_once(found, WARM, fault):
                    break
        return made

    def _strike_once(self, job_: Job, when: str, fault: str) -> bool:
        is_ours = job_.contender.name == "holdfast"
        bound_s = QUICK_BOUND_S if self._is_quick and not is_ours else RECOVERY_BOUND_S[fault]
        one = job_.strike(fault, self._source, self._still, bound_s)
        rounds = self.found.setdefault((job_.contender.name, when, fault), [])
        rounds.append(one)
        took = (
            "not recovered"
            if one.first_step_s is None
            else f"first new step after {one.first_step_s:.2f} s"
        )
        say(f"{job_.contender.name}, {when} {fault} {len(rounds)}: {took}")
        return one.first_step_s is not None


def measure(measurement: Measurement, world_size: int, *, is_quick: bool, rounds: int) -> None:
    """Strike `rounds` times by each fault while warm, and a fifth as often while cold; the peers a fifth as often."""
    ours, shared, unshared = contenders(world_size)
    source = random.Random(rounds)
    if is_quick:
        measurement.fresh_start()
        measurement.strike(unshared, "SIGKILL", ())
        measurement.strike(ours, "SIGKILL", ("SIGKILL", "SIGSTOP"))
        return
    left = [fault for fault in FAULTS for _ in range(rounds)]
    source.shuffle(left)
    number = 0
    while left:
        measurement.fresh_start()
        plan: list[tuple[Contender, str, Sequence[str]]] = [(ours, "SIGKILL", left[:10])]
        plan += [(peer, "SIGKILL", ("SIGKILL", "SIGKILL")) for peer in (shared, unshared)]
        if number == 0:
            plan += [(peer, "SIGSTOP", ()) for peer in (shared, unshared)]
        source.shuffle(plan)
        for contender, cold, warm in plan:
            made = measurement.strike(contender, cold, warm)
            if contender is ours:
                del left[:made]
        number += 1


def rows_of(found: Found, limit_s: float) -> list[Row]:
    """Return the table."""
    rows = []
    for when, fault in ((COLD, "SIGKILL"), (WARM, "SIGKILL"), (WARM, "SIGSTOP")):
        ours = found["holdfast", when, fault]
        what, count = f"{when} {fault}", len(ours)
        all_rounds = {"limit": count, "unit": "rounds", "must": Must("=", count)}
        recovered_s = _present(one.first_step_s for one in ours)
        calm_s = _present(one.first_step_s for one in ours if not one.stood_still)
        right = sum(one.right_rank for one in ours)
        # Nobody can know of a silence before it has lasted as long as the limit says.
        silence_s = HANG_FLOOR_S if fault == "SIGSTOP" else 0.0
        least_s = limit_s if when == COLD else silence_s
        rows += [
            Row(measure=f"{what}: recovered, of {count}", ours=len(recovered_s), **all_rounds),
            Row(measure=f"{what}: right rank and kind, of {count}", ours=right, **all_rounds),
            Row(
                measure=f"{what} → detected, median",
                ours=_quantile(_present(one.detected_s for one in ours), 0.5),
                limit=silence_s,
                unit="s",
            ),
        ]
        musts: tuple[Must | None, Must | None] = (None, None)
        if when == WARM:
            musts = (
                (Must("<=", 0.7), Must("<=", 2.0))
                if fault == "SIGKILL"
                else (Must("<=", 3.0), None)
            )
        unshared_s = _present(
            one.first_step_s for one in found.get(("torchrun, unshared store", when, fault), [])
        )
        rows += [
            Row(
                measure=f"{what} → first new step, median",
                ours=_quantile(recovered_s, 0.5),
                peer=_quantile(unshared_s, 0.5),
                limit=least_s,
                unit="s",
                must=musts[0],
            ),
            Row(
                measure=f"{what} → first new step, 95th percentile of the {len(calm_s)} without a standstill",
                ours=_quantile(calm_s, 0.95),
                peer=_quantile(unshared_s, 0.95),
                limit=least_s,
                unit="s",
                must=musts[1],
            ),
        ]
        if recovered_s and unshared_s:
            ratio = statistics.median(recovered_s) / statistics.median(unshared_s)
            rows.append(
                Row(measure=f"{what}: medians, ours ÷ peer", ours=ratio, peer=1, unit="ratio")
            )
    for (name, when, fault), theirs in found.items():
        if name != "holdfast":
            recovered = len(_present(one.first_step_s for one in theirs))
            measure = f"{name}, {when} {fault}: recovered, of {len(theirs)}"
            rows.append(Row(measure=measure, peer=recovered, limit=len(theirs), unit="rounds"))
    return rows


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least a share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def main() -> int:
    args = parse_arguments(__doc__ or "", rounds=100)
    adopt_orphans()
    world_size = 2 if args.quick else 4
    quiet = Quiet(patience_s=0.0 if args.quick else 20.0)
    measurement = Measurement(
        random.Random(args.seed), quiet, world_size=world_size, is_quick=args.quick
    )
    try:
        with OthersLoad() as others:
            measure(measurement, world_size, is_quick=args.quick, rounds=args.rounds)
    except DoesNotWork as error:
        say(f"restart.py: {error}")
        return 1
    limit_s = min(measurement.starts_s)
    rows = rows_of(measurement.found, limit_s)
    rows.append(
        Row(
            measure="fresh start → first step, median",
            limit=statistics.median(measurement.starts_s),
            unit="s",
        )
    )
    bounds = ", ".join(
        f"{bound_s:.0f} s after {fault}" for fault, bound_s in RECOVERY_BOUND_S.items()
    )
    peers = f" ({QUICK_BOUND_S:.0f} s for the peers with --quick)" if args.quick else ""
    setting = (
        f"{world_size} gloo ranks, steps of {STEP_S:g} s, a checkpoint every 5 steps; hang limit {HANG_FLOOR_S:g} s; "
        "the order is random"
    )
    limit = (
        "limit: of cold restarts, a fresh group without launcher, supervisor and checkpoint, to its first step, the "
        f"fastest of {len(measurement.starts_s)}; of a SIGSTOP, the silence that must pass first"
    )
    notes = [
        setting,
        f"not recovered: no new step within {bounds}{peers}. torchrun has no detector of hangs",
        limit,
        f"a standstill: a thread that wakes up each 10 ms did not run for {STILL_S:g} s",
        quiet.sentence(),
        others.sentence(),
    ]
    report("Fault → first new step", rows, notes=notes, json_file=args.json)
    ours = [one for key, some in measurement.found.items() if key[0] == "holdfast" for one in some]
    if not any(one.first_step_s is not None for one in ours):
        say("restart.py: holdfast never recovered")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
