"""Measure the seconds from a fault to the first new step: ours, torchrun twice, ft_launcher.

Gloo ranks train (`workers/training.py`, the same script with the same Checkpointer for all), in one
run and a random order. `recovering` has the parts:

- `ranks`: a rank is killed, or frozen. The peers are `torchrun --standalone --max-restarts=1000` as
  it is, the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each restart a store of its
  own, and ft_launcher where it is there.
- `deadlock`: a rank of ours waits for a lock for ever, and the others wait in a collective.
- `node`, `first`, `slurm`: a node is killed with all its processes while a spare waits; the node
  that leads the run; a node of a job in a private Slurm.
- `whole`: the wall time of a run with several faults, beside a run that saves each 100 steps under
  torchrun, and one without a fault.

The limit of a restart that imports everything is the start of a fresh group without launcher,
supervisor or checkpoint, to its first step: interpreter, `import torch`, gloo, one step.
"""

import random
import statistics
import sys

from common.jobs import DoesNotWork, adopt_orphans, say
from common.machine import OthersLoad, Quiet
from common.table import Row, parse_arguments, report
from holdfast.testing.slurm import PrivateSlurm
from recovering.jobs import (
    HANG_FLOOR_S,
    RECOVERY_BOUND_S,
    STEP_S,
    STILL_S,
    fresh_start_s,
    missing_peers,
)
from recovering.nodes import node_rows
from recovering.ranks import Measurement, measure, measure_deadlocks, rows_of
from recovering.whole_runs import whole_run_rows

PARTS = ("ranks", "deadlock", "node", "first", "slurm", "whole")
QUICK_PARTS = ("ranks", "node")


def main() -> int:
    args = parse_arguments(__doc__ or "", parts=PARTS, rounds=100)
    adopt_orphans()
    parts = args.only or (QUICK_PARTS if args.quick else PARTS)
    if "slurm" in parts and (reason := PrivateSlurm.missing()) is not None:
        say(f"recover.py: {reason}")
        return 1
    source = random.Random(args.seed)
    quiet = Quiet(patience_s=0.0 if args.quick else 20.0)
    world_size = 2 if args.quick else 4
    few = 1 if args.quick else max(1, args.rounds // 20)
    rows: list[Row] = []
    recovers = True
    try:
        with OthersLoad() as others:
            if "ranks" in parts:
                found = Measurement(source, quiet, world_size=world_size, is_quick=args.quick)
                measure(found, world_size, is_quick=args.quick, rounds=args.rounds)
                starts_s = found.starts_s
                rows += rows_of(found.found, min(starts_s))
                words = "fresh start → first step, median"
                rows.append(Row(measure=words, limit=statistics.median(starts_s), unit="s"))
                of_ours = [some for key, some in found.found.items() if key[0] == "holdfast"]
                recovers = any(one.first_step_s is not None for some in of_ours for one in some)
            else:
                starts_s = [fresh_start_s()]
            if "deadlock" in parts:
                found = Measurement(source, quiet, world_size=world_size, is_quick=args.quick)
                measure_deadlocks(found, world_size, rounds=few * 4)
                rows += rows_of(found.found, min(found.starts_s))
            for part, what, must_s in (
                ("node", "node killed, spare there", 6.0),
                ("first", "first node killed, spare there", 60.0),
                ("slurm", "node of a Slurm job killed, spare there", 6.0),
            ):
                if part in parts:
                    rows += node_rows(
                        what,
                        quiet,
                        source,
                        rounds=few,
                        limit_s=min(starts_s),
                        must_s=must_s,
                        is_first=part == "first",
                        in_slurm=part == "slurm",
                        is_quick=args.quick,
                    )
            if "whole" in parts:
                size = {"steps": 100, "faults": 1} if args.quick else {"steps": 600, "faults": 6}
                rounds = min(few, 3)
                rows += whole_run_rows(source, quiet, rounds=rounds, world_size=world_size, **size)
    except DoesNotWork as error:
        say(f"recover.py: {error}")
        return 1
    bounds = ", ".join(
        f"{bound_s:.0f} s after {fault}" for fault, bound_s in RECOVERY_BOUND_S.items()
    )
    notes = [
        (
            f"{world_size} gloo ranks, steps of {STEP_S:g} s, a checkpoint every 5 steps; "
            f"hang limit {HANG_FLOOR_S:g} s; the order is random"
        ),
        "nodes: 2 of one gloo rank on one host, and a spare; steps of 0.06 s",
        f"not recovered: no new step within {bounds}. torchrun has no detector of hangs",
        (
            "limit: of a cold restart and of a node, a fresh group without launcher, supervisor and checkpoint, to its "
            "first step; of a SIGSTOP, the silence that must pass first"
        ),
        f"a standstill: a thread that wakes up each 10 ms did not run for {STILL_S:g} s",
        missing_peers(),
        quiet.sentence(),
        others.sentence(),
    ]
    report("Fault → first new step", rows, notes=notes, json_file=args.json)
    counts = ("rounds", "count")
    broken = [row.measure for row in rows if row.met is False and row.unit in counts]
    if broken:
        say(f"recover.py: not as it must be: {'; '.join(broken)}")
    return 0 if recovers and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
