"""Compare users' shares, waits and failures with pandas."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_tables import gpu_jobs, made_up, rows_of, trace_of

from holdfast.trace.analyses.users import gini, lorenz, user_outcomes, user_shares, user_waits
from holdfast.trace.errors import LeftOut

UNENDED = ["RUNNING", "PENDING"]
FAILED = ["FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"]


def people(frame):
    return gpu_jobs(frame).fillna({"username": "unknown"}).groupby("username")


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_gini_is_half_the_mean_difference_over_the_mean(amounts):
    amounts = np.array(amounts, dtype=float)
    expected = np.abs(amounts[:, None] - amounts[None, :]).mean() / (2 * amounts.mean())
    assert gini(amounts) == pytest.approx(expected, abs=1e-9)
    x, y = lorenz(amounts)
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, pytest.approx(1))
    assert y[1] == pytest.approx(amounts.max() / amounts.sum())


def test_shares_of_people():
    frame = made_up()
    own = people(frame)
    jobs, seconds = own.size(), own["gpu_time_s"].sum().sort_values(ascending=False)
    with trace_of(frame) as trace:
        result = user_shares(trace, most=3)
    table = result.table.df()
    assert table["user"].tolist() == [*seconds.index[:3], "2 others"]
    named = table.iloc[:3].set_index("user")
    assert named["jobs"].tolist() == jobs[seconds.index[:3]].tolist()
    assert named["share_of_gpu_time"].tolist() == pytest.approx(
        (seconds / seconds.sum())[:3].tolist()
    )
    assert table["share_of_jobs"].iloc[3] == pytest.approx(
        jobs[seconds.index[3:]].sum() / jobs.sum()
    )
    assert table["gpu_time_h"].sum() == pytest.approx(seconds.sum() / 3600)
    numbers = {key.removeprefix("made_up.users."): value for key, value in result.numbers.items()}
    assert numbers["n"] == 5
    assert numbers["top_1_share_of_gpu_time"] == pytest.approx(seconds.iloc[0] / seconds.sum())
    assert numbers["gini_jobs"] == pytest.approx(gini(jobs.to_numpy(float)))
    assert [series.label for series in result.chart.panels[0].series] == ["Made up (n = 5 people)"]


def test_no_more_than_twenty_are_named():
    frame = made_up().assign(username=[f"user {number % 27}" for number in range(3000)])
    with trace_of(frame) as trace:
        results = [analysis(trace) for analysis in (user_shares, user_waits, user_outcomes)]
    for result in results:
        assert len(result.table) == 21
        assert result.table["user"][-1] == "7 others"


def test_waits_of_people():
    frame = made_up()
    own = (
        gpu_jobs(frame)
        .dropna(subset="queue_s")
        .fillna({"username": "unknown"})
        .groupby("username")["queue_s"]
    )
    with trace_of(frame) as trace:
        result = user_waits(trace)
    for row in result.table.df().itertuples():
        waits = own.get_group(row.user)
        assert (row.n, row.mean_queue_s) == (len(waits), pytest.approx(waits.mean()))
        assert row.waited_h == pytest.approx(waits.sum() / 3600)
    assert result.numbers["made_up.users.longest_mean_queue_s"] == pytest.approx(own.mean().max())
    assert f"{own.mean().idxmax()} waits longest" in result.caption


def test_outcomes_of_people():
    frame = made_up()
    own = gpu_jobs(frame).fillna({"username": "unknown"})
    own = own[~own["state"].isin(UNENDED)]
    with trace_of(frame) as trace:
        result = user_outcomes(trace)
    for row in result.table.df().itertuples():
        states = own[own["username"] == row.user]["state"]
        assert row.n == len(states)
        assert row.cancelled_share == pytest.approx((states == "CANCELLED").mean())
        assert row.failed_share == pytest.approx(states.isin(FAILED).mean())


def test_a_compared_cluster_is_in_the_curves_alone():
    with trace_of(made_up(), made_up(1, cluster="Other"), compared=["Other"]) as trace:
        shares, waits = user_shares(trace), user_waits(trace)
    assert [series.role for series in shares.chart.panels[0].series] == ["main", "compared"]
    assert set(waits.table["cluster"]) == {"Made up"}
    assert rows_of(shares.table, cluster="Other")["share_of_jobs"].sum() == pytest.approx(1)


def test_without_users_states_or_waits_it_is_left_out():
    with trace_of(made_up().drop(columns="username")) as trace:
        for analysis in (user_shares, user_waits, user_outcomes):
            with pytest.raises(LeftOut, match="no username"):
                analysis(trace)
    with trace_of(made_up().assign(start_at=pd.NaT, state="RUNNING")) as trace:
        for analysis in (user_waits, user_outcomes):
            with pytest.raises(LeftOut, match="no GPU job with a user"):
                analysis(trace)
