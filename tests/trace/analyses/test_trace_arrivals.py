"""Compare arrivals on the cluster's local clock with pandas."""

import numpy as np
import pandas as pd
import pytest
from job_tables import made_up, openb, philly, rows_of, trace_of

from holdfast.trace.analyses.arrivals import (
    arrival_rhythm,
    burstiness,
    evaluation_batches,
    submissions_per_day,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

OFFSETS = (0.0, 8.0, -7.0, 5.75)


def local(frame, offset_h):
    own = frame[frame["gpu_num"] > 0].copy()
    own["at"] = own["submit_at"] + pd.Timedelta(hours=offset_h)
    return own.fillna({"type": "unknown"}) if "type" in own else own.assign(type="unknown")


def with_clock(frame, offset_h):
    name = frame["cluster"].iloc[0]
    return trace_of(frame, clusters=[Cluster(name=name, source="test", utc_offset_h=offset_h)])


def hourly_counts(own):
    """Count jobs in each local hour from the first to the last, with zeros."""
    hours = own["at"].dt.floor("h")
    return hours.value_counts().reindex(
        pd.date_range(hours.min(), hours.max(), freq="h"), fill_value=0
    )


@pytest.mark.parametrize(
    ("jobs", "offset_h"), [(made_up, offset) for offset in OFFSETS] + [(philly, -8.0), (openb, 8.0)]
)
def test_the_rhythm_of_the_day_and_the_week(jobs, offset_h):
    frame = jobs()
    own = local(frame, offset_h)
    with with_clock(frame, offset_h) as trace:
        result = arrival_rhythm(trace)
    counts = hourly_counts(own)
    mean = counts.groupby([counts.index.strftime("%a"), counts.index.hour]).mean()
    cells = rows_of(result.table, by="weekday")
    assert len(cells) == 7 * 24
    assert cells["jobs"].sum() == len(own)
    for cell in cells.itertuples():
        expected = mean.get((cell.row, cell.hour_of_day), np.nan)
        assert cell.jobs_an_hour == pytest.approx(expected, nan_ok=True)
    for kind, mine in own.groupby("type"):
        of_day = mine["at"].dt.hour.value_counts().reindex(range(24), fill_value=0)
        assert rows_of(result.table, by="type", row=kind)["jobs"].tolist() == of_day.tolist()
    key = frame["cluster"].iloc[0].lower().replace(" ", "_")
    by_hour = counts.groupby(counts.index.hour).mean()
    assert result.numbers[f"{key}.arrivals.busiest_hour"] == by_hour.idxmax()
    assert result.numbers[f"{key}.arrivals.weekend_share"] == pytest.approx(
        (own["at"].dt.day_of_week >= 5).mean()
    )


@pytest.mark.parametrize("offset_h", OFFSETS)
def test_submissions_per_local_day(offset_h):
    frame = made_up()
    own = local(frame, offset_h)
    with with_clock(frame, offset_h) as trace:
        result = submissions_per_day(trace)
    days = own["at"].dt.floor("D")
    for kind, mine in days.groupby(own["type"]):
        rows = rows_of(result.table, type=kind)
        starts = pd.to_datetime(rows["day_start_s"], unit="s") + pd.Timedelta(hours=offset_h)
        assert starts.tolist() == pd.date_range(days.min(), days.max(), freq="D").tolist()
        assert rows["jobs"].tolist() == mine.value_counts().reindex(starts, fill_value=0).tolist()
    assert result.numbers["made_up.arrivals.max_jobs_a_day"] == days.value_counts().max()


def test_dispersion_of_hourly_counts():
    frame = made_up()
    own = local(frame, 0)
    with with_clock(frame, 0) as trace:
        result = burstiness(trace)
    counts = hourly_counts(own)
    assert result.numbers["made_up.gpu_job.hourly_dispersion"] == pytest.approx(
        counts.var(ddof=0) / counts.mean()
    )
    of_type = hourly_counts(own[own["type"] == "SFT"]).reindex(counts.index, fill_value=0)
    row = rows_of(result.table, type="SFT").iloc[0]
    assert row["dispersion"] == pytest.approx(of_type.var(ddof=0) / of_type.mean())
    assert (row["hours"], row["jobs"], row["max_jobs_an_hour"]) == (
        len(counts),
        of_type.sum(),
        of_type.max(),
    )


def test_bursts_disperse_more_than_independent_arrivals():
    frame = made_up()
    burst = frame.assign(submit_at=frame["submit_at"].dt.floor("D"))
    burst.loc[0, "submit_at"] = frame["submit_at"].max()
    with with_clock(frame, 0) as smooth, with_clock(burst, 0) as bursty:
        key = "made_up.gpu_job.hourly_dispersion"
        assert burstiness(smooth).numbers[key] < 2 < 50 < burstiness(bursty).numbers[key]


def test_batches_of_evaluations():
    start = pd.Timestamp("2023-05-17 10:00:00")
    seconds = [0] * 60 + [61, 62, 119] + [600]
    submit_at = start + pd.to_timedelta(seconds, unit="s")
    frame = pd.DataFrame(
        {"cluster": "Kalos", "type": "Evaluation", "gpu_num": 1.0, "submit_at": submit_at}
    )
    other = frame.assign(type="Debug")
    with trace_of(pd.concat([frame, other])) as trace:
        result = evaluation_batches(trace)
    assert rows_of(result.table)[["batch", "share_at_most"]].to_numpy().tolist() == [
        [1, 1 / 64],
        [3, 4 / 64],
        [60, 1],
    ]
    assert result.numbers["kalos.evaluation.share_in_batches_from_60"] == 60 / 64
    assert result.numbers["kalos.evaluation.median_batch"] == 60
    assert "93.8% of 64 in minutes with 60 or more" in result.caption


def test_without_times_of_submission_it_is_left_out():
    with trace_of(made_up().drop(columns="submit_at")) as trace:
        for analysis in (arrival_rhythm, submissions_per_day, burstiness, evaluation_batches):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
