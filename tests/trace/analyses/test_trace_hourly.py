"""Compare hourly integrals with a sum over seconds, and check their totals."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_tables import gpu_jobs, made_up, openb, trace_of

from holdfast.trace.analyses.hourly import coarser, hourly, integrals, step_for

HOURS = 6
SPANS = st.lists(
    st.tuples(
        st.integers(0, HOURS * 3600 - 1),
        st.integers(0, HOURS * 3600 - 1),
        st.sampled_from([0.1, 0.3, 1.0, 8.0]),
    ),
    min_size=1,
    max_size=20,
)


@given(SPANS)
def test_integrals_are_those_added_up_second_by_second(spans):
    expected = np.zeros(HOURS * 3600)
    step, rest_s, hour = [], [], []
    for a, b, gpus in spans:
        begin, end = min(a, b), max(a, b)
        expected[begin:end] += gpus
        for second, change in ((begin, gpus), (end, -gpus)):
            step.append(change)
            rest_s.append(change * (3600 - second % 3600))
            hour.append(second // 3600)
    row = np.zeros(len(step), np.int64)
    found = integrals(np.array(step), np.array(rest_s), row, np.array(hour), (1, HOURS))[0]
    assert (found >= 0).all()
    assert found.tolist() == pytest.approx(
        expected.reshape(HOURS, 3600).sum(axis=1).tolist(), abs=1e-6
    )


def assert_hours(found, begin, end, weight):
    """Check the hours against the spans, each cut at every hour."""
    edges = (found.first_hour + np.arange(found.hours.shape[1] + 1)) * 3600.0
    begin, end = ((times - pd.Timestamp(0)).dt.total_seconds().to_numpy() for times in (begin, end))
    for place in np.linspace(0, found.hours.shape[1] - 1, 40).astype(int):
        inside = np.minimum(end, edges[place + 1]) - np.maximum(begin, edges[place])
        expected = (np.maximum(inside, 0) * weight).sum() / 3600
        assert found.hours[:, place].sum() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("jobs", [openb, made_up])
def test_hours_in_use_and_waited_are_those_of_the_jobs(jobs):
    frame = jobs()
    own = gpu_jobs(frame)
    ran, waited = own[own["end_at"].notna() & own["start_at"].notna()], own[own["start_at"].notna()]
    running = own[own["end_at"].isna() & (own["state"] == "RUNNING") & own["start_at"].notna()]
    with trace_of(frame) as trace:
        cluster = frame["cluster"].iloc[0]
        busy, waiting = (
            hourly(trace, cluster, "busy", "pool"),
            hourly(trace, cluster, "waiting", "gpu_num"),
        )
        wanted = hourly(trace, cluster, "wanted", "pool")
    end = pd.Timestamp((busy.first_hour + busy.hours.shape[1]) * 3600, unit="s")
    all_ran = pd.concat([ran, running.assign(end_at=end)])
    assert_hours(busy, all_ran["start_at"], all_ran["end_at"], all_ran["gpu_num"].to_numpy())
    assert_hours(waiting, waited["submit_at"], waited["start_at"], np.ones(len(waited)))
    assert_hours(wanted, waited["submit_at"], waited["start_at"], waited["gpu_num"].to_numpy())
    assert waiting.hours.sum() == pytest.approx(waited["queue_s"].sum() / 3600)
    assert wanted.hours.sum() == pytest.approx((waited["queue_s"] * waited["gpu_num"]).sum() / 3600)
    assert busy.hours.shape[1] == waiting.hours.shape[1] == wanted.hours.shape[1]
    for kind, hours in zip(waiting.kinds, waiting.hours, strict=True):
        of_size = waited[waited["gpu_num"] == float(kind)]
        assert hours.sum() == pytest.approx(of_size["queue_s"].sum() / 3600, abs=1e-6)


def test_a_cluster_without_starts_has_no_hours():
    with trace_of(made_up().assign(start_at=pd.NaT)) as trace:
        assert hourly(trace, "Made up", "busy", "type") is None


def test_a_job_that_ends_before_it_starts_or_starts_before_its_submission_counts_for_nothing():
    frame = made_up(rows=50).assign(gpu_num=1.0, state="COMPLETED")
    frame["start_at"] = frame["submit_at"] + pd.Timedelta(minutes=7)
    frame["end_at"] = frame["start_at"] + pd.Timedelta(hours=1)
    wrong = frame.iloc[:1].copy()
    wrong["end_at"] = wrong["start_at"] - pd.Timedelta(days=1)
    wrong["submit_at"] = wrong["start_at"] + pd.Timedelta(days=10)
    with trace_of(pd.concat([frame.iloc[1:], wrong])) as trace:
        assert hourly(trace, "Made up", "busy", "type").hours.sum() == pytest.approx(49)
        waited = [hourly(trace, "Made up", "waiting", by).hours.sum() for by in ("type", "gpu_num")]
    expected = (frame["start_at"] - frame["submit_at"]).dt.total_seconds().iloc[1:].sum() / 3600
    assert waited == pytest.approx([expected] * 2)


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(1, 30))
def test_coarser_means_keep_the_sum(hours, step):
    values = np.arange(hours, dtype=float)
    means = coarser(values, step)
    lengths = [min(step, hours - start) for start in range(0, hours, step)]
    assert (means * lengths).sum() == pytest.approx(values.sum())
    assert means[0] == pytest.approx(values[:step].mean())


@given(st.integers(1, 100_000), st.integers(10, 1000))
def test_no_more_points_than_asked_and_days_stay_whole(hours, points):
    step = step_for(hours, points)
    assert -(-hours // step) <= points
    assert 24 % step == 0 or step % 24 == 0
