"""Check the analyses behind the first screen: months, losses by person, idle while allocated."""

import numpy as np
import pandas as pd
import pytest
from job_tables import gpu_jobs, made_up, rows_of, trace_of
from small_traces import add_hours

from holdfast.trace.analyses.idle import idle_while_allocated
from holdfast.trace.analyses.losses import lost_by_person
from holdfast.trace.analyses.months import month_by_month
from holdfast.trace.causes import cause_of
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

FAILED = ["FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"]
START = pd.Timestamp("2023-06-01")


def job(start_h, end_h, gpus, **more):
    times = {
        name: START + pd.Timedelta(hours=hours)
        for name, hours in (("submit_at", start_h), ("start_at", start_h), ("end_at", end_h))
    }
    return {"cluster": "Seren", "state": "COMPLETED", "gpu_num": gpus} | times | more


def test_each_month_has_its_use_wait_and_loss():
    frame = pd.concat([made_up(), made_up(seed=1)], ignore_index=True)
    second = np.arange(len(frame)) >= len(frame) // 2
    for column in ("submit_at", "start_at", "end_at"):
        frame.loc[second, column] += pd.Timedelta(days=31)
    own = gpu_jobs(frame)
    with trace_of(frame) as trace:
        result = month_by_month(trace)
    rows = result.table.df().set_index("month")
    assert list(rows.index)[:2] == ["2023-03", "2023-04"]
    waits = own.dropna(subset="queue_s").groupby(own["submit_at"].dt.strftime("%Y-%m"))["queue_s"]
    failed = own[own["state"].isin(FAILED)]
    lost = failed.groupby(failed["end_at"].dt.strftime("%Y-%m"))["gpu_time_s"].sum() / 3600
    for month in ("2023-03", "2023-04"):
        # Half a second: waits are counted in whole seconds.
        assert rows.loc[month, "p95_queue_s"] == pytest.approx(
            waits.get_group(month).quantile(0.95), abs=0.5
        )
        assert rows.loc[month, "lost_gpu_time_h"] == pytest.approx(lost[month])
        assert 0 < rows.loc[month, "share_in_use"] <= 1
    assert result.numbers["made_up.months.2023-03.lost_gpu_time_h"] == pytest.approx(
        lost["2023-03"]
    )


def test_use_is_the_mean_of_the_covered_hours_of_the_month():
    known = Cluster(name="Seren", source="test", node_num=1, gpus_per_node=16)
    frame = pd.DataFrame([job(0, 2, 8), job(3, 3, 0), job(30 * 24, 30 * 24 + 1, 4)])
    with trace_of(frame, clusters=[known]) as trace:
        rows = month_by_month(trace).table.df()
    assert rows["month"].tolist() == ["2023-06", "2023-07"]
    assert rows["gpus_in_use"].tolist() == pytest.approx([16 / 720, 4])
    assert rows["share_in_use"].tolist() == pytest.approx([1 / 720, 0.25])
    assert rows["lost_gpu_time_h"].tolist() == [0, 0]


def test_lost_time_is_by_person_and_cause_the_largest_first():
    frame = made_up()
    own = gpu_jobs(frame)
    own = own[own["state"].isin(FAILED)]
    own = own.assign(
        user=own["username"].fillna("unknown"),
        reason=[cause_of(state, None, None).reason for state in own["state"]],
    )
    expected = (own.groupby(["user", "reason"])["gpu_time_s"].sum() / 3600).sort_values()[::-1]
    with trace_of(frame) as trace:
        result = lost_by_person(trace)
    rows = result.table.df()
    assert rows["lost_gpu_time_h"].tolist() == pytest.approx(expected.tolist())
    assert list(zip(rows["user"], rows["reason"], strict=True))[:5] == expected.index[:5].tolist()
    assert rows["share_of_lost_gpu_time"].sum() == pytest.approx(1)
    assert result.numbers["made_up.lost_to_failures.jobs"] == len(own)
    assert expected.index[0][0] in result.caption


def test_without_a_failure_nothing_is_lost():
    with (
        trace_of(pd.DataFrame([job(0, 2, 8)])) as trace,
        pytest.raises(LeftOut, match="no failed job held a GPU"),
    ):
        lost_by_person(trace)


KNOWN = Cluster(name="Seren", source="test", node_num=2, gpus_per_node=8)


def hours(*idle, metric="GPU_UTIL"):
    """Hourly sums of 100 samples, with a percentage of zeros in each hour."""
    return [
        ("Seren", metric, str(START + pd.Timedelta(hours=hour)), 100, 0.0, zeros)
        for hour, zeros in enumerate(idle)
    ]


def test_idle_while_allocated_is_what_free_gpus_cannot_explain():
    # 12 of 16 GPUs are held: 4 free ones explain a quarter of idle samples, and no more.
    frame = pd.DataFrame([job(0, 3, 12, state="RUNNING"), job(2.5, 3, 0)])
    with trace_of(frame, clusters=[KNOWN]) as trace:
        add_hours(trace, hours(25, 50, 0, 100))
        result = idle_while_allocated(trace)
    rows = rows_of(result.table)
    assert rows["idle_gpus_at_least"].tolist() == pytest.approx([0, 4, 0])
    assert result.numbers["seren.allocated_idle.gpu_h_at_least"] == pytest.approx(4)
    assert result.numbers["seren.allocated_idle.share_at_least"] == pytest.approx(4 / 36)
    assert "at least 11" in result.caption.lower()


def test_no_more_gpus_are_idle_than_are_held():
    frame = pd.DataFrame([job(0, 1, 12), job(0.5, 1, 0)])
    with trace_of(frame, clusters=[KNOWN]) as trace:
        add_hours(trace, hours(100))
        rows = rows_of(idle_while_allocated(trace).table)
    assert rows["idle_gpus_at_least"].tolist() == [12]


@pytest.mark.parametrize(
    ("cluster", "metric", "at", "why"),
    [
        (KNOWN, "SM_ACTIVE", 0, "no GPU_UTIL"),
        (Cluster(name="Seren", source="test"), "GPU_UTIL", 0, "--capacity"),
        (KNOWN, "GPU_UTIL", 9, "no hour in common"),
    ],
)
def test_what_idle_gpus_need_is_named(cluster, metric, at, why):
    with trace_of(pd.DataFrame([job(0, 2, 8)]), clusters=[cluster]) as trace:
        add_hours(trace, hours(*[50] * (at + 1), metric=metric)[at:])
        with pytest.raises(LeftOut, match=why):
            idle_while_allocated(trace)
