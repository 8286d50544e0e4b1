"""Break a supervised training repeatedly; compare every bit of its end with an undisturbed run.

Two nodes with one gloo rank each train (`workers/chaos_training.py`: DDP, BatchNorm, a queue of
features and the counters of balanced experts written in forward, dropout, AdamW); the nodes are
network namespaces where these can be made, else agents that share this host's address. All faults
come from `holdfast.testing.Injector`.

- `instants`: kill -9 of the supervisor, an agent, a shim, the launcher, a writing process, a rank,
  and the ledger's server (PostgreSQL, which starts again within seconds), each at a random moment
  of a random step. Every fourth one comes while the job still starts again. Training must go on, no
  rank may run twice (each rank holds a lock), no rank may end through the death of a process that
  it does not need, and the final weights must be bit-identical.
- `storm`: faults of all kinds by their weights (`holdfast.testing.injector.WEIGHTS`), with
  exponential times between them, on two nodes and two spares. A killed node comes back after a
  while, as one that was booted again. Printed beside the ETTR of the lost-time account is its bound
  by the kinds' rates and median costs, and the bound by the recorded medians of `recover.py`.

At the end, the weights, optimizer state, schedule and random generators of both ranks are compared
bit for bit with a run of the same script under plain torchrun, without Holdfast, checkpoints or
faults. That run has the same bad batches, and leaves out the batches that the ledger says were left
out. There is no peer: torchrun does not survive its own death. The exit status is 1 if a must is
not met, but for the ETTR, which depends on the machine.
"""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.jobs import (
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
from common.nodes import Nodes, Postgres, can_mount, small_disk, work_folder
from common.table import Must, Row, parse_arguments, print_table, report
from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.ledger import Ledger
from holdfast.core.left_out import ENV_LEAVE_OUT, LeftOut
from holdfast.core.paths import ledger_url
from holdfast.testing.hosts import Hosts
from holdfast.testing.injector import (
    WEIGHTS,
    Injector,
    Kind,
    read_log,
    schedule,
)
from holdfast.testing.rank_faults import ENV_FOLDER
from recovering.storm_bounds import bounds, recorded_costs

PARTS = ("instants", "storm")
SCRIPT = str(WORKERS / "chaos_training.py")
RANKS = (0, 1)
INSTANTS, QUICK_INSTANTS = 200, 3
STORM_S, QUICK_STORM_S = 1800.0, 14.0
MTBF_S = 60.0
STEP_S = 0.1
SAVE_EVERY = 10
STEPS_A_KILL = 15
"""Steps from one instant to the next: a checkpoint comes between them."""
MAX_STEPS_A_KILL = 45
"""Steps of the script for each instant: also those that pass while an instant waits for a start."""
LAST_STEPS = 20
START_S = 3.0
"""Seconds within which a fault that is to meet a start comes."""
PATIENCE_S = 300.0
"""Seconds without a new step after which a run is given up."""
BOOT_S = 20.0
"""A killed node comes back after so long."""
HEALTHY: tuple[Kind | str, ...] = (
    "supervisor killed",
    "agent killed",
    "writer killed",
    "ledger killed",
)
"""Faults that no rank may end through."""
DEADLY: tuple[Kind | str, ...] = ("rank killed", "shim killed", "launcher killed")
QUICK_STORM: Mapping[int, Kind] = {
    20: "supervisor killed",
    45: "rank killed",
}
"""The faults of a quick storm, by the step at which each one comes."""


@dataclass(kw_only=True)
class Outcome:
    """The results of one run."""

    steps: int
    faults: list[tuple[str, float]]
    """Each fault that took effect: its kind, and its moment in Unix seconds."""
    people: list[str]
    """The reason for each time that a person would have been needed."""
    healthy_killed: list[str]
    differing: list[str] | None = None
    """The differences from the undisturbed run; None: the run did not come to its end."""
    twice: int = 0
    left_over: list[str]
    summary: RunSummary | None = None
    left_out: LeftOut
    wall_s: float = 0.0


class Steps:
    """The steps that the ranks have written: each step's process and number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = dict.fromkeys(RANKS, 0)
        self._rest = dict.fromkeys(RANKS, "")
        self._lines: dict[int, list[tuple[int, int]]] = {rank: [] for rank in RANKS}

    def of(self, rank: int) -> list[tuple[int, int]]:
        """Return the process and the step, for each step that a rank has completed."""
        path = self._folder / f"steps-{rank}.txt"
        if path.exists():
            with path.open() as file:
                file.seek(self._read[rank])
                text = self._rest[rank] + file.read()
                self._read[rank] = file.tell()
            *lines, self._rest[rank] = text.split("\n")
            # A line that a kill has cut in two is joined with the next.
            parts = [line.split() for line in lines]
            self._lines[rank] += [(int(one[0]), int(one[1])) for one in parts if len(one) == 2]
        return self._lines[rank]

    @property
    def newest(self) -> int:
        """The highest step that both ranks have completed, in any attempt."""
        return min(max((step for _, step in self.of(rank)), default=0) for rank in RANKS)

    @property
    def count(self) -> int:
        """The number of steps of rank 0, those made again too."""
        return len(self.of(0))

    def pids(self) -> tuple[int, ...]:
        """Return the process of each rank's last step."""
        return tuple(steps[-1][0] for rank in RANKS if (steps := self.of(rank)))


class Run:
    """One run under faults."""

    def __init__(self, folder: Path, nodes: Nodes, outcome: Outcome) -> None:
        self.steps = Steps(folder)
        self._folder, self._nodes, self._outcome = folder, nodes, outcome
        self._down: dict[int, float] = {}
        self._seen, self._seen_s = 0, time.monotonic()

    def is_over(self) -> bool:
        """Look after the run; return whether it has ended.

        Nodes that were killed are started again.

        Raises:
            DoesNotWork: no step is completed for too long, or the run has failed.
        """
        ended = self._nodes.ended()
        codes = {number: self._nodes.processes[number].returncode for number in ended}
        if any(code == 0 for code in codes.values()):
            return True
        for number, code in codes.items():
            if code > 0:
                self._outcome.people.append(f"n{number + 1} ended with code {code}")
                raise DoesNotWork(self._outcome.people[-1])
            if time.monotonic() > self._down.setdefault(number, time.monotonic() + BOOT_S):
                del self._down[number]
                self._nodes.start(number)
        if (count := self.steps.count) > self._seen:
            self._seen, self._seen_s = count, time.monotonic()
        if time.monotonic() - self._seen_s > PATIENCE_S:
            self._outcome.people.append(f"no step for {PATIENCE_S:.0f} s after {self.steps.newest}")
            raise DoesNotWork(self._outcome.people[-1])
        return False

    def wait(self, holds: Callable[[], bool]) -> bool:
        """Wait until `holds` returns true; return False if the run ends before."""
        while not holds():
            if self.is_over():
                return False
            time.sleep(POLL_S)
        return True


def final_of(folder: Path) -> dict[str, str]:
    """Return the digests of everything that both ranks held in the end, by rank and name."""
    return {
        f"rank {rank}: {name}": digest
        for rank in RANKS
        for name, digest in json.loads((folder / f"final-{rank}.json").read_text()).items()
    }


@functools.cache
def undisturbed(steps: int, left_out: LeftOut, bad_batches: frozenset[str]) -> dict[str, str]:
    """Return the digests that the script ends with under plain torchrun.

    Args:
        steps: of the run.
        left_out: the batches that this run leaves out, too.
        bad_batches: the files that name the bad batches, which are bad here, too.
    """
    with work_folder() as folder:
        bad = folder / "bad"
        bad.mkdir()
        for name in bad_batches:
            (bad / name).touch()
        options = ("--standalone", f"--nproc-per-node={len(RANKS)}")
        command = (*TORCHRUN, *options, SCRIPT, str(steps), "--bare", "--step-s", "0")
        told = {ENV_LEAVE_OUT: left_out.as_text(), ENV_FOLDER: str(bad)}
        with job(command, folder, environment=told) as process:
            is_over = wait_until(lambda: process.poll() is not None, timeout_s=60 + steps)
            if not is_over or process.returncode:
                raise DoesNotWork(f"the script does not train by itself:\n{last_words(folder)}")
        return final_of(folder)


def left_over(folder: Path, before: set[str]) -> list[str]:
    """Return what a run has left: processes and shared memory."""
    mark = str(folder)

    def processes() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_living = process.status() != psutil.STATUS_ZOMBIE
                if is_living and process.environ().get("HOLDFAST_HOME", "").startswith(mark):
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
        return found

    def shared() -> list[str]:
        # A reservation holds no memory: the next process that reserves some deletes a dead one's.
        # A folder named after the user is an evaluation's, which may run beside this.
        others = ("holdfast-taking", f"holdfast-{os.geteuid()}")
        names = sorted({one.name for one in Path("/dev/shm").iterdir()} - before)
        return [
            f"/dev/shm/{one}" for one in names if "holdfast" in one and not one.startswith(others)
        ]

    wait_until(lambda: not processes() and not shared(), timeout_s=30.0)
    return [*processes(), *shared()]


def conduct(
    part: str, steps: int, options: Sequence[str], strike: Callable[..., None], *, spares: int
) -> Outcome:
    """Make one run under faults, and compare its end with an undisturbed one.

    Args:
        part: `instants` or `storm`.
        steps: of the run.
        options: further ones of the script.
        strike: called with the run, the injector, the outcome, and the PostgreSQL server or None;
            injects the faults.
        spares: nodes beyond the two that train.
    """
    outcome = Outcome(
        steps=steps, faults=[], people=[], healthy_killed=[], left_over=[], left_out=LeftOut()
    )
    is_storm = part == "storm"
    shared = {one.name for one in Path("/dev/shm").iterdir()}
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        # The checkpoints fill a disk of their own: the script's own files are not what a full disk
        # is to hit.
        disk = folder / "disk"
        disk.mkdir()
        if is_storm and can_mount():
            stack.enter_context(small_disk(disk))
        hosts = None
        if is_storm and Hosts.missing() is None:
            hosts = stack.enter_context(Hosts.made([f"n{n}" for n in range(1, 3 + spares)]))
        server = None
        if not is_storm and Postgres.is_installed():
            server = stack.enter_context(Postgres())
        home = folder / ".holdfast"
        injector = Injector(
            folder / "faults.jsonl",
            home=home,
            run_id="r",
            seed=steps,
            orders=folder / "orders",
            checkpoints=disk / "checkpoints",
            hosts=hosts,
        )
        stack.callback(injector.close)
        words = (SCRIPT, str(steps), "--save-every", str(SAVE_EVERY), *options)
        words = (*words, "--checkpoints", "disk/checkpoints")
        nodes = Nodes(
            folder,
            (sys.executable, *words),
            2 + spares,
            hosts=hosts,
            options=("--hang-floor-s", "2"),
            ledger=None if server is None else server.url,
            environment=injector.environment,
        )
        began_s = time.monotonic()
        try:
            with nodes:
                run = Run(folder, nodes, outcome)
                run.wait(lambda: run.steps.newest > 2)
                strike(run, injector, outcome, server)
                run.wait(lambda: False)
                outcome.wall_s = time.monotonic() - began_s
                wait_until(lambda: len(nodes.ended()) == nodes.count, timeout_s=60.0)
                outcome.left_over = left_over(folder, shared)
                with Ledger.open(nodes.ledger or ledger_url(home)) as ledger:
                    outcome.summary = summarize(ledger, home, "r")
                    skips = [one.data for one in ledger.events("r", kinds=["leave_out"])]
            outcome.left_out = LeftOut.of((one["first"], one["last"]) for one in skips)
            found = final_of(folder)
            bad = frozenset(one.name for one in (folder / "orders").glob("bad-*-*"))
            expected = undisturbed(steps, outcome.left_out, bad)
            names = sorted(expected.keys() | found.keys())
            outcome.differing = [name for name in names if expected.get(name) != found.get(name)]
        except (DoesNotWork, OSError) as error:
            say(f"{part}: {error}:\n{last_words(folder, 60)}")
            keep = os.environ.get("KEEP_FAILED")
            if keep:
                subprocess.run(["cp", "-r", str(folder), keep], check=False)
        outcome.faults += [
            (one.kind, one.took_effect_at_s)
            for one in read_log(folder / "faults.jsonl")
            if one.took_effect_at_s is not None
        ]
        twice = folder / "twice.txt"
        outcome.twice = len(twice.read_text().splitlines()) if twice.exists() else 0
    return outcome


# Instants


def instants(count: int, source: random.Random, *, is_quick: bool) -> Outcome:
    """Strike at `count` random instants.

    A quick run has the steps of a quick storm, so that one undisturbed run is the truth for both.
    """
    chosen: list[str] = []
    kinds = [*HEALTHY, *DEADLY]
    while len(chosen) < count:
        # Each kind as often as any other, in a random order.
        source.shuffle(kinds)
        chosen += kinds
    del chosen[count:]

    def strike(run: Run, injector: Injector, outcome: Outcome, server: Postgres | None) -> None:
        goal = 0
        for number, kind in enumerate(chosen):
            meets_start = number % 4 == 1
            if not meets_start:
                # From the newest step on: the last fault must be over before the ranks' pids are
                # read.
                goal = max(goal, run.steps.newest) + STEPS_A_KILL
                if not run.wait(lambda g=goal: run.steps.newest >= g):  # type: ignore[misc]
                    return
                done = run.steps.count
                run.wait(lambda d=done: run.steps.count > d)  # type: ignore[misc]
            time.sleep(source.uniform(0.0, START_S if meets_start else 0.5))
            pids = run.steps.pids()
            before = len(run.steps.of(0))
            if kind == "ledger killed":
                _kill_ledger(server, source, outcome)
            else:
                injector.inject(kind)  # type: ignore[arg-type]
            if kind in HEALTHY and not meets_start and number % 4 != 0:
                run.wait(lambda b=before: run.steps.count > b + 5)  # type: ignore[misc]
                if run.steps.pids() != pids:
                    outcome.healthy_killed.append(f"{kind} (instant {number + 1})")
                    say(f"ranks {pids} became {run.steps.pids()} through: {kind}")
            say(f"instant {number + 1} of {count}, step {run.steps.newest}: {kind}")

    steps, step_s = MAX_STEPS_A_KILL * (count + 1) + LAST_STEPS, 0.03
    if is_quick and count <= QUICK_INSTANTS:
        steps, step_s = int(QUICK_STORM_S / STEP_S), STEP_S
    return conduct("instants", steps, ("--step-s", str(step_s)), strike, spares=0)


def _kill_ledger(server: Postgres | None, source: random.Random, outcome: Outcome) -> None:
    if server is None:  # no PostgreSQL is installed; a file has no process
        return
    server.kill()
    outcome.faults.append(("ledger killed", time.time()))
    timer = threading.Timer(source.uniform(0.0, 4.0), server.start)
    timer.start()
    timer.join()  # a second kill of the same server would meet its start


# Storm


def storm(duration_s: float, seed: int, *, is_quick: bool) -> Outcome:
    """Let faults of all kinds come for so long."""

    def strike(run: Run, injector: Injector, _outcome: Outcome, _server: object) -> None:
        began_s = time.monotonic()
        faults: list[tuple[Callable[[], bool], Kind]] = [
            (lambda step=step: run.steps.newest >= step, kind)  # type: ignore[misc]
            for step, kind in QUICK_STORM.items()
        ]
        if not is_quick:
            planned = schedule(seed, mtbf_s=MTBF_S, duration_s=duration_s, kinds=injector.kinds)
            faults = [
                (lambda at_s=one.at_s: time.monotonic() > began_s + at_s, one.kind)  # type: ignore[misc]
                for one in planned
            ]
        for is_due, kind in faults:
            if not run.wait(is_due):
                return
            done = injector.inject(kind)
            passed_s = time.monotonic() - began_s
            say(f"{passed_s:6.1f} s, step {run.steps.newest}: {kind}: {done.node} {done.detail}")

    steps = int(duration_s / STEP_S)
    return conduct("storm", steps, ("--step-s", str(STEP_S)), strike, spares=0 if is_quick else 2)


# Rows


def rows_of(part: str, outcome: Outcome, *, at_least: int) -> Iterator[Row]:
    """Yield the rows of a part."""
    none = {"limit": 0, "unit": "", "must": Must("=", 0)}
    is_same = outcome.differing == []
    if outcome.differing:
        say(f"{part}: {len(outcome.differing)} differ: {', '.join(outcome.differing[:5])}")
    for what in (*outcome.people, *outcome.healthy_killed, *outcome.left_over):
        say(f"{part}: {what}")
    yield Row(
        measure=f"{part}: faults that took effect",
        ours=len(outcome.faults),
        unit="faults",
        must=Must(">=", at_least),
    )
    yield Row(
        measure=f"{part}: ends bit-identical",
        ours=int(is_same),
        limit=1,
        unit="",
        must=Must("=", 1),
    )
    yield Row(measure=f"{part}: times that a person was needed", ours=len(outcome.people), **none)  # type: ignore[arg-type]
    yield Row(measure=f"{part}: ranks that ran twice", ours=outcome.twice, **none)  # type: ignore[arg-type]
    yield Row(
        measure=f"{part}: healthy ranks that ended",
        ours=len(outcome.healthy_killed),
        **none,  # type: ignore[arg-type]
    )
    yield Row(
        measure=f"{part}: processes and shared memory left over",
        ours=len(outcome.left_over),
        **none,  # type: ignore[arg-type]
    )
    summary = outcome.summary
    if summary is None:
        return
    yield Row(measure=f"{part}: attempts", ours=len(summary.attempts), unit="attempts")
    yield Row(
        measure=f"{part}: steps computed again, of {outcome.steps}",
        ours=summary.steps_lost,
        unit="steps",
    )
    yield Row(
        measure=f"{part}: batches left out, as the ledger declares",
        ours=sum(last - first + 1 for first, last in outcome.left_out.ranges),
        unit="batches",
    )
    yield Row(
        measure=f"{part}: share of the time that no record explains",
        ours=summary.lost_time.unexplained_share,
        unit="ratio",
        must=Must("<=", 0.01),
    )


def ettr_rows(outcome: Outcome, *, is_quick: bool) -> Iterator[Row]:
    """Yield the ETTR of a storm."""
    if outcome.summary is None:
        return
    limit, recorded_limit, lines = bounds(outcome.faults, outcome.summary, recorded_costs())
    medians = ("detect s, median", "restart s, median", "recover.py s")
    columns = ("fault", "faults", "incidents", *medians)
    print_table("Storm: what each kind cost", columns, lines)
    lost = sorted(outcome.summary.lost_time.by_cause.items(), key=lambda one: -one[1])
    total_s = outcome.summary.lost_time.total_s
    lines = [(cause, f"{seconds:.1f}", f"{seconds / total_s:.2%}") for cause, seconds in lost]
    print_table("Storm: every rank's seconds by cause", ("cause", "s", "share"), lines)
    for cause, seconds in lost:
        each_s = seconds / outcome.summary.lost_time.ranks
        yield Row(measure=f"storm: time of each rank, {cause}", ours=each_s, unit="s")
    yield Row(
        measure="storm: ETTR, by the lost-time account",
        ours=outcome.summary.ettr,
        limit=limit,
        unit="ratio",
        must=None if is_quick else Must(">=", 0.9),
    )
    yield Row(
        measure="storm: ETTR, bound by the recorded medians of recover.py",
        limit=recorded_limit,
        unit="ratio",
    )


def main() -> int:
    words = {
        "instants": f"random instants (default: {INSTANTS}; {QUICK_INSTANTS} if quick)",
        "seconds": f"of the storm (default: {STORM_S:.0f}; {QUICK_STORM_S:.0f} if quick)",
    }
    args = parse_arguments(__doc__ or "", parts=PARTS, counts=words)
    adopt_orphans()
    parts = args.only or PARTS
    count = args.instants or (QUICK_INSTANTS if args.quick else INSTANTS)
    duration_s = args.seconds or (QUICK_STORM_S if args.quick else STORM_S)
    rows: list[Row] = []
    with OthersLoad() as others:
        try:
            if "instants" in parts:
                outcome = instants(count, random.Random(args.seed), is_quick=args.quick)
                rows += rows_of("instants", outcome, at_least=count)
            if "storm" in parts:
                outcome = storm(duration_s, args.seed, is_quick=args.quick)
                rows += rows_of("storm", outcome, at_least=1)
                rows += ettr_rows(outcome, is_quick=args.quick)
        except DoesNotWork as error:
            say(f"chaos.py: {error}")
            return 1
    shares = ", ".join(f"{kind} {weight}" for kind, weight in WEIGHTS.items())
    notes = [
        "limit of the ETTR: 1 less the sum over the kinds of rate times (median detection + median restart)",
        f"storm: MTBF {MTBF_S:.0f} s; weights of 100: {shares}"
        if not args.quick
        else "storm: chosen faults",
        others.sentence(),
    ]
    report("What a run survives", rows, notes=notes, json_file=args.json)
    broken = [row.measure for row in rows if row.met is False and "ETTR" not in row.measure]
    if broken:
        say(f"chaos.py: not as it must be: {'; '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
