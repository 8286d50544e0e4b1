"""Reduce the counters of a recording to one curve a metric: lowest, mean and highest over all devices.

A curve has a bounded number of points, so that a page can show the curves of any run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.profile.metrics import METRICS
from holdfast.profile.recording import Recording, Series

MAX_POINTS: Final = 300
MAX_BYTES: Final = 32 * 1024 * 1024
"""The most bytes that are read, from the newest part on: some hours of a node with 8 GPUs."""
NO_CURVES: Final = ("gpu_memory_total", "host_memory_total", "gpu_energy", "sampler_cpu")
"""The metrics that are constant or only grow."""


@dataclass(frozen=True, kw_only=True)
class UsageCurve:
    """One metric over time, over all nodes, devices and ranks.

    Attributes:
        unit: the unit of the values.
        meaning: the metric in one sentence.
        series: the number of nodes, devices or ranks.
        times_s: the beginning of each point, Unix seconds.
        low: the lowest value of each point.
        mean: the mean of each point's values.
        high: the highest value of each point.
    """

    metric: str
    unit: str
    meaning: str
    series: int
    times_s: Sequence[float]
    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


def usage_curves(
    folder: Path, *, most_bytes: int = MAX_BYTES, most_points: int = MAX_POINTS
) -> list[UsageCurve]:
    """Return the curves of a recording, which may still be written.

    Args:
        folder: the folder of the recording.
        most_bytes: the most bytes of files that are read, from the newest part on.
        most_points: the most points of a curve.

    Raises:
        NotFound: the folder holds no recording.
        BadUse: a newer version of Holdfast has written the recording.
    """
    recording = Recording.read(folder, most_bytes=most_bytes, has_spans=False)
    found: dict[str, list[Series]] = {}
    for one in recording.series:
        if one.metric not in NO_CURVES and len(one.values):
            found.setdefault(one.metric, []).append(one)
    return [_curve(metric, found[metric], most_points) for metric in METRICS if metric in found]


def _curve(metric: str, series: Sequence[Series], most_points: int) -> UsageCurve:
    first_ns = min(one.times_ns[0] for one in series)
    last_ns = max(one.times_ns[-1] for one in series)
    least_ns = round(max(one.interval_s for one in series) * 1e9)
    width_ns = max(least_ns, (last_ns - first_ns) // most_points + 1)
    points: dict[int, tuple[float, float, float, int]] = {}
    for one in series:
        for at_ns, value in zip(one.times_ns, one.values, strict=True):
            key = max(0, (at_ns - first_ns) // width_ns)  # a clock may have been set back
            low, high, total, count = points.get(key, (value, value, 0.0, 0))
            points[key] = min(low, value), max(high, value), total + value, count + 1
    # If a clock was set forward, there may be too many points; the last ones are the newest.
    keys = sorted(points)[-most_points:]
    return UsageCurve(
        metric=metric,
        unit=METRICS[metric].unit,
        meaning=METRICS[metric].meaning,
        series=len(series),
        times_s=[(first_ns + key * width_ns) / 1e9 for key in keys],
        low=[points[key][0] for key in keys],
        mean=[points[key][2] / points[key][3] for key in keys],
        high=[points[key][1] for key in keys],
    )
