"""Check the small charts of speed and metrics."""

import math
import re
from dataclasses import replace

import pytest
import sample_runs

from holdfast.core.accounting import Point, summarize
from holdfast.ui.metric_charts import CHARTS_LIMIT, PLACES, gathered, metric_charts


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
        return summarize(ledger, home, "demo-1")


def test_speed_loss_and_every_reported_number_have_a_chart(summary):
    charts = metric_charts(summary)
    assert [chart.name for chart in charts] == ["steps per second", "val_loss", "loss"]
    speeds = [point.value for point in summary.metrics["steps per second"]]
    assert min(speeds) > 0
    steps = [point.step for point in summary.metrics["steps per second"]]
    assert steps == sorted(set(steps))  # surviving steps alone: each once
    assert steps[-1] == summary.final_step


def test_the_value_of_each_place_is_under_the_pointer(summary):
    points = tuple(Point(step, step * 0.5) for step in range(10, 60, 10))
    (chart,) = metric_charts(replace(summary, metrics={"lr": points}, loss=_without_loss(summary)))
    said = re.findall(r'<g class="at">.*?>(step [^<]*)</text></g>', chart.svg)
    assert said == ["step 10: 5", "step 20: 10", "step 30: 15", "step 40: 20", "step 50: 25"]
    widths = [
        float(width) for width in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', chart.svg)
    ]
    assert sum(widths) == pytest.approx(320, abs=1)  # no gap between the places
    assert chart.last == "25"


def _without_loss(summary):
    return replace(summary.loss, surviving=())


def test_a_spike_of_one_step_stays_in_the_range():
    points = [Point(step, 1.0) for step in range(10_000)]
    points[5000] = Point(5000, 9.0)
    points[7000] = Point(7000, math.nan)
    places = gathered(points)
    assert len(places) <= PLACES
    assert max(place.high for place in places) == 9.0
    assert places[-1].step == 9999
    assert all(place.low == 1.0 for place in places)


def test_many_metrics_are_bounded_and_names_are_text(summary):
    points = (Point(1, 1.0), Point(2, 2.0))
    many = {f"m{number}": points for number in range(40)}
    assert len(metric_charts(replace(summary, metrics=many))) == CHARTS_LIMIT
    (chart,) = metric_charts(
        replace(summary, metrics={'"><script>': points}, loss=_without_loss(summary))
    )
    assert "<script" not in chart.svg


def test_one_point_or_none_is_no_chart(summary):
    metrics = {"a": (Point(1, 1.0),), "b": (Point(1, math.inf), Point(2, math.nan))}
    assert metric_charts(replace(summary, metrics=metrics, loss=_without_loss(summary))) == ()
