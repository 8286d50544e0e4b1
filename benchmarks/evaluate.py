"""Evaluation: real lm-eval suites beside stock lm-eval; an emulated cluster beside the bound.

`--only PART` runs one part (repeatable); with `--json FILE` the rows of other parts in FILE are
kept. A part that fails is reported and counts as not met; the others run. `stock-full`, the slow
baseline in full, runs only if named.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.jobs import adopt_orphans
from common.machine import OthersLoad, Quiet
from common.parts import run_parts
from common.table import Row, parse_arguments, report
from evaluation import (
    brute_force,
    emulation,
    peers,
    real,
    remote_bytes,
    reuse,
    sandbox,
    scale,
    stream,
)
from evaluation.stock import OFFLINE

ROUNDS = 5
PATIENCE_S = 60.0
GLANCE_S = 0.1
"""The look at the machine before each measurement of a quick run, which does not wait."""
COLUMNS = "ours: Holdfast; peer, limit: as the row says in brackets, else as benchmarks/README.md does; must: asked of ours"  # noqa: E501
Part = Callable[..., Iterator[Row]]
PARTS: dict[str, Part] = {
    "bound": brute_force.rows,
    "remote-bytes": remote_bytes.rows,
    "sandbox": sandbox.rows,
    "scale": scale.rows,
    "peers": peers.rows,
    "emulation": emulation.rows,
    "stream": stream.rows,
    "real": real.rows,
    "again": reuse.rows,
    "stock-full": real.stock_in_full,
}
BY_NAME_ONLY = ("stock-full",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all musts are met, else 1."""
    options = parse_arguments(__doc__ or "", arguments, rounds=ROUNDS, parts=tuple(PARTS))
    adopt_orphans()
    os.environ.update(OFFLINE)
    chosen = options.only or [name for name in PARTS if name not in BY_NAME_ONLY]
    rounds = 1 if options.quick else options.rounds
    quiet = (
        Quiet(patience_s=0, window_s=GLANCE_S) if options.quick else Quiet(patience_s=PATIENCE_S)
    )
    failures: list[str] = []

    def rows_of(name: str, folder: Path) -> Iterator[Row]:
        return PARTS[name](folder, quiet, quick=options.quick, rounds=rounds, seed=options.seed)

    with OthersLoad() as load:
        found = run_parts(chosen, rows_of, file=options.json, failures=failures)
    notes = [
        COLUMNS,
        load.sentence(),
        quiet.sentence(),
        f"medians of {rounds} round{'s' * (rounds > 1)}; emulated times are the emulation's own seconds",
        *failures,
    ]
    report("Evaluation", found, notes=notes)
    return 0 if all(row.met is not False for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
