"""Compute bounds of a storm's ETTR from the costs of its faults."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.core.accounting import RunSummary

RECOVER_RESULTS = Path(__file__).parents[1] / "results" / "recover.json"
MEASURED_BY_RECOVER = {
    "rank killed": "warm SIGKILL",
    "rank frozen": "warm SIGSTOP",
    "deadlock": "warm deadlock",
    "node killed": "node killed, spare there",
}
"""The kinds of faults that `recover.py` measures too, with the beginning of its measures' names."""


def bounds(
    faults: Sequence[tuple[str, float]], summary: RunSummary, recorded: Mapping[str, float]
) -> tuple[float, float, list[tuple[object, ...]]]:
    """Return bounds of the ETTR by the kinds' rates and median costs, and a line for each kind.

    An incident belongs to the last fault before its detection. The first bound uses the costs in
    this storm. The second one uses the recorded costs; for kinds without a record, the costs in
    this storm.

    Args:
        faults: the kind of each fault, and its time in Unix seconds.
        summary: the run's summary.
        recorded: the recorded costs in seconds, by the kind (see `recorded_costs`).
    """
    costs: dict[str, list[tuple[float, float]]] = {}
    faults = sorted(faults, key=lambda one: one[1])
    for one in summary.incidents:
        before = [kind for kind, at_s in faults if at_s <= one.incident.detected_at_s]
        at_s = max(
            (at for _, at in faults if at <= one.incident.detected_at_s), default=one.fault_at_s
        )
        detected_s = one.incident.detected_at_s - at_s
        restart_s = one.seconds_to_restart or 0.0
        costs.setdefault(before[-1] if before else "no fault", []).append((detected_s, restart_s))
    lines: list[tuple[object, ...]] = []
    lost_s = recorded_lost_s = 0.0
    for kind, count in sorted(Counter(kind for kind, _ in faults).items()):
        some = costs.pop(kind, [])
        detect_s = statistics.median(one for one, _ in some) if some else 0.0
        restart_s = statistics.median(one for _, one in some) if some else 0.0
        lost_s += len(some) * (detect_s + restart_s)
        recorded_lost_s += len(some) * recorded.get(kind, detect_s + restart_s)
        known = f"{recorded[kind]:.1f}" if kind in recorded else ""
        lines.append((kind, count, len(some), f"{detect_s:.1f}", f"{restart_s:.1f}", known))
    for kind, some in costs.items():
        lines.append((kind, 0, len(some), "", "", ""))
    wall_s = max(1.0, summary.wall_s)
    return max(0.0, 1 - lost_s / wall_s), max(0.0, 1 - recorded_lost_s / wall_s), lines


def recorded_costs() -> dict[str, float]:
    """Return the recorded median seconds from a fault to the first new step, by the kind."""
    rows = {row["measure"]: row["ours"] for row in json.loads(RECOVER_RESULTS.read_text())}
    found = {
        kind: rows.get(f"{measure} → first new step, median")
        for kind, measure in MEASURED_BY_RECOVER.items()
    }
    return {kind: median_s for kind, median_s in found.items() if median_s is not None}
