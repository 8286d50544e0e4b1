"""Compare CDFs of durations with pandas on real jobs, and with the counts behind published curves."""

import numpy as np
import pandas as pd
import pytest
from job_tables import (
    assert_cdf,
    gpu_jobs,
    kalos,
    made_up,
    openb,
    philly,
    published,
    rows_of,
    trace_of,
)

from holdfast.trace.analyses.durations import (
    cpu_job_duration,
    duration_by_type,
    durations,
    gpu_job_duration,
)
from holdfast.trace.errors import LeftOut


@pytest.mark.parametrize("jobs", [philly, openb, kalos, made_up])
def test_gpu_job_durations_are_those_of_the_jobs(jobs):
    frame = jobs()
    expected = gpu_jobs(frame).dropna(subset="run_s")
    with trace_of(frame) as trace:
        result = gpu_job_duration(trace)
    by_jobs, by_time = (rows_of(result.table, weight=weight) for weight in ("jobs", "gpu_time"))
    assert_cdf(by_jobs, expected["run_s"], np.ones(len(expected)), "duration_s")
    positive = expected[expected["gpu_time_s"] > 0]
    assert_cdf(by_time, positive["run_s"], positive["gpu_time_s"], "duration_s")
    key = frame["cluster"].iloc[0].lower().replace(" ", "_") + ".gpu_job"
    assert result.numbers[f"{key}.n_with_duration_s"] == len(expected)
    assert result.numbers[f"{key}.median_duration_s"] == expected["run_s"].median()
    assert result.numbers[f"{key}.mean_duration_s"] == pytest.approx(expected["run_s"].mean())
    assert result.numbers[f"{key}.p90_duration_s"] == pytest.approx(expected["run_s"].quantile(0.9))
    assert result.numbers[f"{key}.max_duration_s"] == expected["run_s"].max()
    ordered = positive.sort_values("run_s")
    reached = ordered["run_s"][
        ordered["gpu_time_s"].cumsum() >= ordered["gpu_time_s"].sum() / 2
    ].iloc[0]
    assert result.numbers[f"{key}.gpu_time_median_duration_s"] == reached
    assert f"n = {len(expected):,}" in result.caption
    assert f"n = {len(expected):,}" in result.chart.panels[0].series[0].label


def test_the_published_curves_by_type_come_out_to_the_job():
    curves, frames = published("duration_s")
    with trace_of(*frames.values()) as trace:
        for (cluster, kind), rows in curves.groupby(["cluster", "type"]):
            if kind == "ALL_CPU":
                continue
            jobs = durations(trace, cluster, type=None if kind == "ALL_GPU" else kind).counted.jobs
            missing = rows["n_total"].iloc[0] - jobs.total
            assert missing == (
                8 if (cluster, kind) == ("Kalos", "ALL_GPU") else 0
            )  # SFT has no curve
            counts = np.round(jobs.at_most(rows["x_le"]) * jobs.total)
            assert (rows["cum_count"] - counts).between(0, missing).all()
        result = duration_by_type(trace)
    assert result.numbers["seren.evaluation.n_with_duration_s"] == 292_212
    rows = rows_of(result.table, cluster="Seren", part="Evaluation", weight="jobs")
    own = np.sort(frames["Seren"].query("type == 'Evaluation'")["run_s"])
    counted = np.searchsorted(own, rows["duration_s"], side="right")
    assert (rows["share_at_most"] * 292_212).tolist() == pytest.approx(counted.tolist())


def test_types_and_cpu_jobs_are_told_apart():
    frame = made_up()
    with trace_of(frame) as trace:
        by_type, cpu = duration_by_type(trace), cpu_job_duration(trace)
    expected = gpu_jobs(frame).dropna(subset=["run_s", "type"])
    for kind, own in expected.groupby("type"):
        rows = rows_of(by_type.table, part=kind, weight="jobs")
        assert_cdf(rows, own["run_s"], np.ones(len(own)), "duration_s")
        assert by_type.numbers[f"made_up.{kind.lower()}.median_duration_s"] == own["run_s"].median()
    of_cpu = frame[frame["gpu_num"] == 0]
    run_s = (of_cpu["end_at"] - of_cpu["start_at"]).dt.total_seconds().dropna()
    assert_cdf(rows_of(cpu.table), run_s, np.ones(len(run_s)), "duration_s")
    assert set(cpu.table["weight"]) == {"jobs"}


def test_a_compared_trace_is_drawn_as_such_and_said():
    own, other = made_up(1), made_up(2, cluster="Other")
    other["end_at"] = other["start_at"] + 3 * (other["end_at"] - other["start_at"])
    with trace_of(other, own, compared=["Other"]) as trace:
        result = gpu_job_duration(trace)
    medians = [gpu_jobs(frame)["run_s"].median() for frame in (own, other)]
    assert [series.role for series in result.chart.panels[0].series] == ["main", "compared"]
    assert result.numbers["made_up.gpu_job.times_shorter_least"] == pytest.approx(
        medians[1] / medians[0]
    )
    assert f"{medians[1] / medians[0]:.1f} times" in result.caption


def test_released_durations_are_what_the_source_says():
    frame = made_up()
    frame["reported_duration_s"] = 7.0
    with trace_of(frame, duration="released") as trace:
        result = gpu_job_duration(trace)
    assert result.numbers["made_up.gpu_job.max_duration_s"] == 7.0
    assert "as released" in result.chart.panels[0].x.label


def test_what_is_below_a_second_is_drawn_at_a_second_but_not_in_the_table():
    frame = made_up(rows=4).assign(gpu_num=1.0, run_s=[0.0, 0.25, 8.0, 64.0])
    with trace_of(frame) as trace:
        result = gpu_job_duration(trace)
    series = result.chart.panels[0].series[0]
    assert list(zip(series.x, series.y, strict=True)) == [(1, 0.5), (8, 0.75), (64, 1)]
    assert rows_of(result.table, weight="jobs")["duration_s"].tolist() == [0, 0.25, 8, 64]


def test_without_durations_types_or_cpu_jobs_it_is_left_out():
    frame = made_up().drop(columns="type").assign(end_at=pd.NaT, gpu_num=1.0)
    with trace_of(frame) as trace:
        for analysis in (gpu_job_duration, cpu_job_duration, duration_by_type):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
