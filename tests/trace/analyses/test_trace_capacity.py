"""Compare GPUs in use with pandas and with the capacity."""

import numpy as np
import pandas as pd
import pytest
from job_tables import gpu_jobs, made_up, rows_of, trace_of

from holdfast.trace.analyses.capacity import (
    allocation,
    beyond_capacity,
    gpus_in_use,
    gpus_over_time,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

START = pd.Timestamp("2023-06-01")


def job(submit_h, start_h, end_h, gpus, kind="SFT"):
    times = {
        name: START + pd.Timedelta(hours=hours)
        for name, hours in (("submit_at", submit_h), ("start_at", start_h), ("end_at", end_h))
    }
    return {"cluster": "Seren", "type": kind, "state": "COMPLETED", "gpu_num": gpus} | times


SMALL = pd.DataFrame([job(0, 0, 4, 8), job(0.5, 1.5, 2, 4, "Evaluation"), job(3, 3.25, 90, 2)])


def test_means_are_exact_and_the_emptying_after_the_last_submission_is_left_out():
    with trace_of(SMALL) as trace:
        first, by_type = gpus_in_use(trace, "Seren")
    assert pd.Timestamp(first * 3600, unit="s") == START
    assert by_type["SFT"].tolist() == pytest.approx([8, 8, 8, 8 + 2 * 0.75])
    assert by_type["Evaluation"].tolist() == pytest.approx([0, 2, 0, 0])


def test_the_first_hour_is_that_of_the_first_start():
    with trace_of(pd.DataFrame([job(0, 3, 4, 8), job(5, 5, 6, 8)])) as trace:
        first, by_type = gpus_in_use(trace, "Seren")
    assert pd.Timestamp(first * 3600, unit="s") == START + pd.Timedelta(hours=3)
    assert by_type["SFT"].tolist() == [8, 0, 8]


def test_against_the_capacity_or_the_busiest_hour():
    known = Cluster(name="Seren", source="test", node_num=1, gpus_per_node=9)
    with trace_of(SMALL, clusters=[known]) as trace, trace_of(SMALL) as unknown:
        of_capacity, of_peak = allocation(trace), allocation(unknown)
        caption = gpus_over_time(unknown).caption
    used = np.array([8, 10, 8, 9.5])
    assert of_capacity.numbers["seren.allocation.mean"] == pytest.approx((used / 9).mean())
    assert of_capacity.numbers["seren.allocation.median"] == pytest.approx(np.median(used / 9))
    assert of_capacity.numbers["seren.allocation.hours_above_capacity"] == 2
    assert "in 2 hours more is in use than there is" in of_capacity.caption
    assert of_peak.numbers["seren.allocation.mean"] == pytest.approx((used / 10).mean())
    assert of_peak.numbers["seren.allocation.hours_above_capacity"] == 0
    assert rows_of(of_capacity.table)["share_at_most"].tolist() == pytest.approx([0.5, 0.75, 1])
    assert "of 10 (busiest hour seen)" in caption


def test_over_time_the_gpu_hours_are_those_of_the_jobs():
    frame = made_up()
    frame = frame[frame["state"] != "RUNNING"]
    own = gpu_jobs(frame).dropna(subset="end_at").fillna({"type": "unknown"})
    with trace_of(frame) as trace:
        result = gpus_over_time(trace, points=100)
    # Hours up to the end of the last submission's hour.
    end = frame["submit_at"].max().floor("h") + pd.Timedelta(hours=1)
    inside = (own["end_at"].clip(upper=end) - own["start_at"].clip(upper=end)).dt.total_seconds()
    gpu_h = (inside * own["gpu_num"]).groupby(own["type"]).sum() / 3600
    assert result.numbers["made_up.in_use.gpu_time_h"] == pytest.approx(gpu_h.sum())
    chart = result.chart.panels[0]
    assert [series.label.partition(" (")[0] for series in chart.series[:-1]] == [
        "Pretrain", "Evaluation", "SFT", "Other", "unknown",
    ]  # fmt: skip
    for series in chart.series[:-1]:
        kind = series.label.partition(" (")[0]
        rows = rows_of(result.table, type=kind)
        assert (series.high - series.low).tolist() == pytest.approx(rows["gpus"].tolist())
        assert len(rows) <= 100
        step_h = np.diff(rows["at_s"])[0] / 3600
        assert rows["gpus"].iloc[:-1].sum() * step_h <= gpu_h[kind] * (1 + 1e-9)
        assert f"{gpu_h[kind] / gpu_h.sum():.1%}" in series.label
    assert chart.series[-1].style == "dashed"


def test_a_compared_cluster_is_in_the_cdf_and_not_over_time():
    with trace_of(made_up(), SMALL, compared=["Seren"]) as trace:
        assert set(gpus_over_time(trace).table["cluster"]) == {"Made up"}
        assert [series.role for series in allocation(trace).chart.panels[0].series] == [
            "main",
            "compared",
        ]


def test_without_times_of_submission_all_hours_are_there():
    with trace_of(SMALL.drop(columns="submit_at")) as trace:
        by_type = gpus_in_use(trace, "Seren")[1]
    assert len(by_type["SFT"]) == 91
    assert by_type["SFT"].sum() == pytest.approx(8 * 4 + 2 * 86.75)


def test_without_starts_it_is_left_out():
    with trace_of(made_up().assign(start_at=pd.NaT)) as trace:
        for analysis in (gpus_over_time, allocation):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)


@pytest.mark.parametrize(("gpus", "hours"), [(7, 4), (8, 2), (9.8, 1), (10, 0)])
def test_hours_in_which_jobs_hold_more_than_there_is_are_told(gpus, hours):
    # Means of the hours: 8, 8 + 2, 8, 8 + 1.5.
    known = Cluster(name="Seren", source="test", node_num=1, gpus_per_node=gpus, gpu_num=gpus)
    with trace_of(SMALL, clusters=[known]) as trace:
        notes = beyond_capacity(trace)
    assert [(note.check, note.rows, note.action) for note in notes] == [
        ("beyond-capacity", hours, "kept")
    ] * bool(hours)
    if hours:
        assert notes[0].examples == ("2023-06-01T01:00 UTC",)
        assert "10.0 on average in the worst" in notes[0].sentence
    with trace_of(SMALL) as trace:
        assert beyond_capacity(trace) == ()
