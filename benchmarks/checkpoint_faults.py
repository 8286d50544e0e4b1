"""Checkpoints under real faults: a restore must return, bit for bit, the newest whole step.

Each fault goes into a copy of checkpoints that Holdfast wrote, or into a save on its way. A process
without knowledge of the fault then restores, and `checkpoint_faulting/oracle.py` judges. The peer
is stock PyTorch's `dcp.load` of files of `dcp.save` with the same damage: the number of silent
loads of wrong tensors. A kind that this machine cannot have prints why. The exit status is 1 if a
must is not met.
"""

import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import psutil
import torch

from checkpoint_faulting import plan, stock
from checkpoint_faulting.forks import Fork
from checkpoint_faulting.ground import make
from checkpoint_faulting.oracle import Verdict
from common.jobs import adopt_orphans, say
from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, report

PROCESSES: Final = 3
"""Jobs at a time; parts of each are waits."""
SHARED_MEMORY: Final = Path("/dev/shm")
SHOWN: Final = 5
OURS: Final = "holdfast-faults-"
"""The begin of all names; other programs come and go."""
MEANT: Final = {
    "silent": "silent corruptions",
    "stuck": "runs that cannot restore, or do not go on",
    "older": "restored an older step than the newest whole one",
    "crash": "errors that are no sentence",
    "executed": "code of a checkpoint that was run",
    "left": "files, processes or memory left over",
}


@dataclass
class Tally:
    """The results of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def count(self) -> int:
        """Return the number of injections."""
        return sum(self.outcomes.values())

    def add(self, outcome: plan.Outcome) -> None:
        """Add the outcome of one job."""
        if isinstance(outcome, str):
            self.skipped = outcome
            return
        if isinstance(outcome, tuple):
            verdict, has_come = outcome
            outcome = [verdict] if has_come or not verdict.is_right else []
        for verdict in outcome if isinstance(outcome, list) else [outcome]:
            self.outcomes[verdict.outcome] += 1
            if not verdict.is_right:
                self.wrong.append(f"{verdict.outcome}: {verdict.detail}")


def run(job: plan.Job) -> tuple[str, plan.Outcome]:
    """Run one job in a process of the pool."""
    try:
        return job.kind, job.run()
    except Exception:
        return job.kind, Verdict("crash", traceback.format_exc())


def run_all(jobs: Iterable[plan.Job]) -> dict[str, Tally]:
    """Run all jobs, a few at a time."""
    found: dict[str, Tally] = defaultdict(Tally)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        waiting = [pool.submit(run, job) for job in jobs]
        for number, ended in enumerate(as_completed(waiting), start=1):
            kind, outcome = ended.result()
            found[kind].add(outcome)
            if number % 1000 == 0:
                say(f"{number} of {len(waiting)}")
    return found


def rows_of(
    found: Mapping[str, Tally], peer: Mapping[str, int], left: int, wanted: int
) -> list[Row]:
    """Return the table."""
    outcomes = sum((tally.outcomes for tally in found.values()), Counter[str]())
    rows = [
        Row(measure="injections", ours=outcomes.total(), unit="faults", must=Must(">=", wanted))
    ]
    rows += [
        Row(measure=meaning, ours=outcomes[outcome], unit="faults", must=Must("=", 0))
        for outcome, meaning in MEANT.items()
    ]
    rows.append(
        Row(
            measure="processes, mounts and shared memory at the end",
            ours=left,
            unit="",
            must=Must("=", 0),
        )
    )
    for kind, tally in sorted(found.items(), key=lambda item: list(item[1].outcomes) == []):
        if tally.skipped:
            rows.append(Row(measure=f"  {kind}: skipped, {tally.skipped}", unit=""))
            continue
        wrong = tally.count - tally.outcomes["right"]
        measure = f"  {kind}, of {tally.count}: not as it must be"
        rows.append(
            Row(measure=measure, ours=wrong, peer=peer.get(kind), unit="faults", must=Must("=", 0))
        )
    return rows


def what_is_there() -> set[str]:
    """Return processes below this one, mounts, and files in shared memory."""
    children = psutil.Process().children(recursive=True)
    living = {
        f"process {child.pid}" for child in children if child.status() != psutil.STATUS_ZOMBIE
    }
    mounts = {line for line in Path("/proc/self/mounts").read_text().splitlines() if OURS in line}
    return living | mounts | set(map(str, SHARED_MEMORY.glob(f"{OURS}*")))


def main() -> int:
    args = parse_arguments(__doc__ or "")
    adopt_orphans()
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    sizes = plan.QUICK if args.quick else plan.FULL
    there, began_s = what_is_there(), time.monotonic()
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with OthersLoad() as others:
        with tempfile.TemporaryDirectory(prefix=OURS, dir=place) as name:
            ground = make(Path(name) / "ground", args.seed)
            (scratch := Path(name) / "scratch").mkdir()
            found = run_all(plan.jobs(ground, scratch, sizes))
            peer = Fork(
                stock.silently_wrong, Path(name) / "stock", args.seed, sizes.damages
            ).answer()
        left = what_is_there() - there
    for kind, tally in found.items():
        for wrong in tally.wrong[:SHOWN]:
            say(f"WRONG: {kind}: {wrong}")
    rows = rows_of(found, peer, len(left), sizes.injections)
    notes = (
        f"seed {args.seed}, {(time.monotonic() - began_s) / 60:.1f} min",
        "peer: of as many, how often stock dcp.load loads wrong tensors and says nothing",
        f"storage stands still for {sizes.stall_s:g} s; a stopped writing process has {sizes.silent_s:g} s",
        others.sentence(),
        *sorted(left),
    )
    report("Checkpoints under faults", rows, notes=notes, json_file=args.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
