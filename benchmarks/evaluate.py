"""Evaluation: real lm-eval suites beside stock lm-eval, and an emulated cluster beside the bound and others' policies.

`--only PART` runs one part (it may be given several times); with `--json FILE` the rows of other parts that FILE holds
are kept. A part that fails is told and counts as not met; the others run. `stock-full`, the slow baseline in full, runs
only when it is named.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.jobs import adopt_orphans, say
from common.machine import OthersLoad, Quiet
from common.table import Must, Row, parse_arguments, report
from evaluation import brute_force, emulation, peers, real, remote_bytes, sandbox, scale, stream
from evaluation.stock import OFFLINE
from holdfast.core.processes import kill_descendants

ROUNDS = 5
PATIENCE_S = 60.0
GLANCE_S = 0.1
"""At the machine before each measurement of a quick run, which waits for nobody."""
COLUMNS = (
    "ours: Holdfast; peer, limit: as the row says in brackets, else as benchmarks/README.md does; must: asked of ours"
)
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
    "stock-full": real.stock_in_full,
}
BY_NAME_ONLY = ("stock-full",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether all musts are met."""
    options = parse_arguments(__doc__ or "", arguments, rounds=ROUNDS, parts=tuple(PARTS))
    adopt_orphans()
    os.environ.update(OFFLINE)
    chosen = options.only or [name for name in PARTS if name not in BY_NAME_ONLY]
    rounds = 1 if options.quick else options.rounds
    quiet = Quiet(patience_s=0, window_s=GLANCE_S) if options.quick else Quiet(patience_s=PATIENCE_S)
    kept = _kept(options.json, chosen)
    found: list[Row] = []
    failures: list[str] = []
    with OthersLoad() as load:
        for name in chosen:
            began_s = time.monotonic()
            rows = _rows_of(name, PARTS[name], quiet, failures, quick=options.quick, rounds=rounds, seed=options.seed)
            found += [row.within(name) for row in rows]
            _write(options.json, kept, found)
            say(f"{name}: {time.monotonic() - began_s:.0f} s")
    notes = [
        COLUMNS,
        load.sentence(),
        quiet.sentence(),
        f"medians of {rounds} round{'s' * (rounds > 1)}; emulated times are the emulation's own seconds",
        *failures,
    ]
    report("Evaluation", found, notes=notes)
    _write(options.json, kept, found)
    return 0 if all(row.met is not False for row in found) else 1


def _rows_of(
    name: str, part: Part, quiet: Quiet, failures: list[str], *, quick: bool, rounds: int, seed: int
) -> list[Row]:
    """A part's rows; of one that fails those that it had, and one that says so."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=f"holdfast-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            # One by one: what a part has measured is kept when it fails later.
            for row in part(Path(folder), quiet, quick=quick, rounds=rounds, seed=seed):
                found.append(row)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"FAILED: {name}: {error}")
            found.append(Row(measure="ran to its end", ours=0, unit="", must=Must("=", 1)))
        finally:
            kill_descendants()
    return found


def _kept(file: Path | None, chosen: Sequence[str]) -> list[dict[str, object]]:
    """The rows of other parts that `file` holds."""
    rows: list[dict[str, object]] = []
    if file is not None:
        with contextlib.suppress(FileNotFoundError):
            rows = json.loads(file.read_text())
    return [row for row in rows if str(row["measure"]).partition(": ")[0] not in chosen]


def _write(file: Path | None, kept: Sequence[dict[str, object]], found: Sequence[Row]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [*kept, *(row.to_json() for row in found)]
        file.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
