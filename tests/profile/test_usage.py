"""The counters of a recording as one bounded curve a metric."""

from pathlib import Path

import pytest

from holdfast.core.errors import NotFound
from holdfast.profile import RecordingWriter, SeriesId, usage_curves

UNIX_S = 1_700_000_000
SECOND_NS = 1_000_000_000


def clocks() -> tuple[int, int]:
    return 0, UNIX_S * SECOND_NS


def power(device: int) -> SeriesId:
    return SeriesId("gpu_power", "nvml", device=device)


def test_a_curve_holds_the_lowest_the_mean_and_the_highest_of_all_devices(tmp_path: Path) -> None:
    total = SeriesId("gpu_memory_total", "nvml", device=0)
    for node, values in (("a", (100.0, 300.0)), ("b", (500.0, 700.0))):
        with RecordingWriter(tmp_path, node=node, clocks=clocks) as writer:
            for second in range(3):
                watts = {power(0): values[0], power(1): values[1] + second}
                writer.sample(second * SECOND_NS, {**watts, total: 8e10})
    (curve,) = usage_curves(tmp_path)
    assert (curve.metric, curve.unit, curve.series) == ("gpu_power", "W", 4)
    assert curve.times_s == [UNIX_S, UNIX_S + 1, UNIX_S + 2]
    assert curve.low == [100.0] * 3
    assert curve.mean == [400.0, 400.5, 401.0]
    assert curve.high == [700.0, 701.0, 702.0]


def test_a_long_curve_is_bounded_and_keeps_its_extremes(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="a", clocks=clocks) as writer:
        for second in range(1000):
            watts = {700: 1.0, 701: 900.0}.get(second, 400.0)
            writer.sample(second * SECOND_NS, {power(0): watts})
    (curve,) = usage_curves(tmp_path, most_points=50)
    assert len(curve.times_s) == len(curve.mean) == 50
    assert (min(curve.low), max(curve.high)) == (1.0, 900.0)
    assert curve.times_s == sorted(curve.times_s)


def test_ranks_alone_are_no_counters(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="a", rank=0, clocks=clocks) as writer:
        writer.spans(1, [("forward", 1, 2)])
    with pytest.raises(NotFound):
        usage_curves(tmp_path)
