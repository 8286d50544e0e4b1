"""Write the measured times of the package's table from `benchmarks/results/`.

    python benchmarks/simulating/packaged_times.py

Assumed times in the table, and figures without a result, are kept.
"""

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
TABLE = Path(__file__).parents[2] / "src/holdfast/simulate/pretrain/tables/times.toml"
SOURCES: dict[str, tuple[str, str]] = {
    "exit_s": ("recover", "warm SIGKILL → detected, median"),
    "stall_s": ("checkpoint", "lost: lost a save, attested"),
    "durable_s": ("checkpoint", "lost: durable after, median, attested"),
    "peer_lag_s": ("checkpoint", "surviving: held by the peer after it was durable"),
    "peer_restore_s": ("checkpoint", "surviving: a lost node restored by its peer in (limit: from disk)"),
    "restart_decision": ("diagnosis", "laboratory: restart decision (780 of 798)"),
}  # fmt: skip
"""The result file and the measure of each figure."""
HANG_LIMIT_S = 2.0
"""The limit in `recover.py`; only the time after the limit counts."""


def measured(results: Path) -> dict[str, float]:
    """Return the figures that the results give."""
    found: dict[str, float] = {}
    rows = {
        path.stem: {row["measure"]: row["ours"] for row in json.loads(path.read_text())}
        for path in sorted(results.glob("*.json"))
    }
    for name, (file, measure) in SOURCES.items():
        # The counts in the name of a measure change from run to run.
        wanted = measure.partition(" (")[0]
        for own, figure in rows.get(file, {}).items():
            if own.partition(" (")[0] == wanted and figure is not None:
                found.setdefault(name, float(figure))
    hang = rows.get("recover", {}).get("warm SIGSTOP → detected, median")
    if hang is not None:
        found["hang_after_limit_s"] = max(0.0, hang - HANG_LIMIT_S)
    beyond = rows.get("checkpoint", {}).get("surviving: restored in, beyond the copy")
    copy = rows.get("checkpoint", {}).get("surviving: restored in (limit: a copy)")
    if beyond is not None and copy is not None:
        found["memory_restore_s"] = beyond + copy
    return found


def rewritten(table: str, figures: dict[str, float]) -> str:
    """Return the table with the figures in its measured part."""
    head, mark, rest = table.partition("[measured]\n")
    body, middle, assumed = rest.partition("\n[assumed]")
    lines = []
    for line in body.splitlines():
        name = line.partition(" = ")[0]
        lines.append(f"{name} = {figures[name]:.3g}" if name in figures else line)
    return head + mark + "\n".join(lines) + "\n" + middle + assumed


def main() -> int:
    TABLE.write_text(rewritten(TABLE.read_text("utf-8"), measured(RESULTS)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
