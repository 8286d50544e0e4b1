"""Checkpointing: the training time that a save costs, and the time until durable and restored.

`--only PART` runs one part (repeatable); with `--json FILE` the rows of other parts in FILE are
kept. A part that fails is reported and counts as not met; the others run. `--dir DIR` is on the
disk to measure.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from checkpointing import (
    buffers,
    durable,
    gpu,
    growth,
    limits,
    lost,
    resharding,
    restoring,
    surviving,
)
from checkpointing.sizes import FULL, QUICK, Sizes
from common.jobs import adopt_orphans
from common.machine import OthersLoad, Quiet
from common.parts import run_parts
from common.table import Row, parse_arguments, report

ROUNDS = 3
PATIENCE_S = 60.0
GLANCE_S = 0.1
"""The look at the machine before each measurement of a quick run, which does not wait."""
Part = Callable[[Path, Quiet, Sizes, int], Iterator[Row]]
PARTS: dict[str, Part] = {
    "limits": limits.rows,
    "lost": lost.large_rows,
    "many": lost.many_rows,
    "durable": durable.rows,
    "restore": restoring.rows,
    "surviving": surviving.rows,
    "reshard": resharding.rows,
    "growth": growth.rows,
    "buffers": buffers.rows,
    "gpu": gpu.rows,
}
COLUMNS = (
    "ours: Holdfast, without attestation where nothing else is said; peer: the best of them, or who stands in "
    "[brackets]; limit: what the machine permits, or what the row describes"
)
LOST = "lost: the steps with a save, until it is durable and one more, less as many without; a process for each case"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all musts are met, else 1."""
    options = _options(arguments)
    adopt_orphans()
    tempfile.tempdir = options.dir and str(options.dir)
    sizes, rounds = (
        (QUICK, 1)
        if options.quick
        else (replace(FULL, gpu_bytes=options.gpu_gb * 1e9), options.rounds)
    )
    quiet = (
        Quiet(patience_s=0, window_s=GLANCE_S) if options.quick else Quiet(patience_s=PATIENCE_S)
    )
    failures: list[str] = []

    def rows_of(name: str, folder: Path) -> Iterator[Row]:
        rows = PARTS[name](folder, quiet, sizes, rounds)
        return (replace(row, must=None) for row in rows) if options.quick else rows

    with OthersLoad() as load:
        found = run_parts(
            options.only or list(PARTS), rows_of, file=options.json, failures=failures
        )
    told = f"medians of {rounds} round{'s' * (rounds > 1)}"
    notes = (COLUMNS, LOST, told, load.sentence(), quiet.sentence(), *failures)
    report("Checkpointing", found, notes=notes)
    return 0 if all(row.met is not False for row in found) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = sys.argv[1:] if arguments is None else list(arguments)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--dir", type=Path)
    own.add_argument("--gpu-gb", type=float, default=FULL.gpu_bytes / 1e9)
    options, rest = own.parse_known_args(given)
    if options.dir is not None and not options.dir.is_dir():
        own.error(f"--dir {options.dir} is no folder: make it, on the disk to measure")
    about = (
        f"{(__doc__ or '').partition(chr(10))[0]} Besides: --dir DIR, on the disk to measure, for the checkpoints; "
        "--gpu-gb N, a limit to the GPU's state."
    )
    return argparse.Namespace(
        **vars(options), **vars(parse_arguments(about, rest, rounds=ROUNDS, parts=tuple(PARTS)))
    )


if __name__ == "__main__":
    sys.exit(main())
