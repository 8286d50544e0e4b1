"""Run a benchmark in parts; a failed part counts as not met, and a file keeps other rows."""

import contextlib
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.jobs import say
from common.table import Must, Row
from holdfast.core.processes import kill_descendants


def run_parts(
    chosen: Sequence[str],
    rows_of: Callable[[str, Path], Iterator[Row]],
    *,
    file: Path | None,
    failures: list[str],
) -> list[Row]:
    """Return the rows of all `chosen` parts, and write them to `file` after each part.

    `file` keeps its rows of other parts. `rows_of` receives a part's name and a separate folder. A
    sentence for each failed part is added to `failures`.
    """
    kept = _kept(file, chosen)
    found: list[Row] = []
    for name in chosen:
        began_s = time.monotonic()
        found += [row.within(name) for row in _rows_of(name, rows_of, failures)]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [*kept, *(row.to_json() for row in found)]
            file.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
        say(f"{name}: {time.monotonic() - began_s:.0f} s")
    return found


def _rows_of(
    name: str, rows_of: Callable[[str, Path], Iterator[Row]], failures: list[str]
) -> list[Row]:
    """Return a part's rows; if it fails, its rows so far and a row for the failure."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(
        prefix=f"holdfast-{name}-", ignore_cleanup_errors=True
    ) as folder:
        try:
            for row in rows_of(name, Path(folder)):
                found.append(
                    row
                )  # one by one: what a part has measured is kept when it fails later
        except Exception as error:
            traceback.print_exc()
            failures.append(f"FAILED: {name}: {error}")
            found.append(Row(measure="ran to its end", ours=0, unit="", must=Must("=", 1)))
        finally:
            kill_descendants()
    return found


def _kept(file: Path | None, chosen: Sequence[str]) -> list[dict[str, object]]:
    """Return the rows of other parts in `file`."""
    rows: list[dict[str, object]] = []
    if file is not None:
        with contextlib.suppress(FileNotFoundError):
            rows = json.loads(file.read_text())
    return [row for row in rows if str(row["measure"]).partition(": ")[0] not in chosen]
