"""Check attributed waiting in small cases by hand, and its sums against the jobs."""

import numpy as np
import pandas as pd
import pytest
from job_tables import gpu_jobs, made_up, openb, rows_of, trace_of

from holdfast.trace.analyses.waiting import (
    wait_by_size,
    waiting_while_free,
    who_waits,
    who_waits_for_whom,
    who_waits_for_whom_by_pool,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

START = pd.Timestamp("2023-06-01")


def job(kind, gpus, submit_h, start_h, end_h):
    times = {
        name: START + pd.Timedelta(hours=hours)
        for name, hours in (("submit_at", submit_h), ("start_at", start_h), ("end_at", end_h))
    }
    return {
        "cluster": "Seren",
        "type": kind,
        "pool": f"{kind} pool",
        "gpu_num": float(gpus),
        "state": "COMPLETED",
    } | times


# An SFT job of 2 GPUs waits through hour 0, in which pretraining holds 6 GPUs throughout and
# evaluation 2 for half; then half an hour of hour 1, in which pretraining holds all.
BY_HAND = pd.DataFrame(
    [job("Pretrain", 6, 0, 0, 2), job("Evaluation", 2, 0, 0, 0.5), job("SFT", 2, 0, 1.5, 1.5)]
)


def test_by_hand():
    with trace_of(BY_HAND) as trace:
        kinds, job_hours = who_waits(trace, "Seren", "type", "waiting")
        gpu_hours = who_waits(trace, "Seren", "type", "wanted")[1]
        result = who_waits_for_whom(trace)
    assert kinds == ["Evaluation", "Pretrain", "SFT"]
    # Hour 0: 7 GPU-hours held, 6 by pretraining, 1 by evaluation.
    assert job_hours[2].tolist() == pytest.approx([1 / 7, 6 / 7 + 0.5, 0, 0])
    assert gpu_hours[2].tolist() == pytest.approx([2 / 7, 12 / 7 + 1, 0, 0])
    assert job_hours[:2].sum() == pytest.approx(0)
    assert result.numbers["seren.waiting.sft_for_pretrain_h"] == pytest.approx(6 / 7 + 0.5)
    row = rows_of(result.table, weight="GPU-hours waited", waiter="SFT", holder="Pretrain").iloc[0]
    assert (row["hours"], row["share_of_waiting"]) == (
        pytest.approx(19 / 7),
        pytest.approx(19 / 21),
    )
    assert "SFT while Pretrain held the GPUs (90.5%)" in result.caption
    assert result.table["waiter"].tolist()[:3] == ["Pretrain"] * 3  # the study's order
    heatmap = result.chart.panels[0]
    assert heatmap.x.ticks == ["Pretrain", "Evaluation", "SFT"]
    assert heatmap.values[2].tolist() == pytest.approx([6 / 7 + 0.5, 1 / 7, 0])


def test_waiting_while_nobody_holds_a_gpu_is_for_nobody():
    frame = pd.DataFrame([job("SFT", 1, 0, 2, 3)])
    with trace_of(frame) as trace:
        kinds, matrix = who_waits(trace, "Seren", "type", "waiting")
        result = who_waits_for_whom(trace)
    assert (kinds, matrix.tolist()) == (["SFT"], [[0.0, 2.0]])
    assert result.numbers["seren.waiting.sft_for_nobody_h"] == 2


@pytest.mark.parametrize("jobs", [openb, made_up])
def test_all_waiting_of_jobs_that_started_is_attributed(jobs):
    frame = jobs()
    own = gpu_jobs(frame).dropna(subset="queue_s")
    with trace_of(frame) as trace:
        result = who_waits_for_whom_by_pool(trace, most=2)
    by_pool = own.fillna({"pool": "unknown"}).groupby("pool")
    for unit, hours in (
        ("job-hours waited", by_pool["queue_s"].sum() / 3600),
        (
            "GPU-hours waited",
            by_pool.apply(lambda part: (part["queue_s"] * part["gpu_num"]).sum()) / 3600,
        ),
    ):
        rows = rows_of(result.table, weight=unit)
        assert rows["hours"].sum() == pytest.approx(hours.sum())
        assert rows["share_of_waiting"].sum() == pytest.approx(1)
        ranked = hours.sort_values(ascending=False)
        waited = rows.groupby("waiter")["hours"].sum()
        for pool in ranked.index[:2]:
            assert waited[pool] == pytest.approx(ranked[pool])
        if len(ranked) > 2:
            assert waited["others"] == pytest.approx(ranked.iloc[2:].sum())
            assert set(rows["holder"]) - {"nobody"} == {*ranked.index[:2], "others"}


def test_who_waits_is_who_waited_replayed_hour_by_hour():
    frame = made_up(rows=400)
    frame = frame[frame["state"] != "RUNNING"].assign(type=frame["type"].fillna("unknown"))
    own = gpu_jobs(frame).dropna(subset="start_at")
    with trace_of(frame) as trace:
        kinds, found = who_waits(trace, "Made up", "type", "waiting")
    second = {
        name: own[name].to_numpy("datetime64[s]").astype(float)
        for name in ("submit_at", "start_at", "end_at")
    }
    ran = own["end_at"].notna().to_numpy()
    of_kind = np.array([own["type"] == kind for kind in kinds], dtype=float)
    expected = np.zeros((len(kinds), len(kinds) + 1))
    for low in (
        np.arange(second["submit_at"].min() // 3600, second["end_at"][ran].max() // 3600 + 1) * 3600
    ):
        at = {name: np.clip(times, low, low + 3600) for name, times in second.items()}
        waited = of_kind @ (at["start_at"] - at["submit_at"]) / 3600
        held = of_kind @ np.where(ran, (at["end_at"] - at["start_at"]) * own["gpu_num"], 0.0)
        if held.sum() > 0:
            expected[:, :-1] += np.outer(waited, held / held.sum())
        else:
            expected[:, -1] += waited
    assert found.ravel().tolist() == pytest.approx(expected.ravel().tolist(), abs=1e-6)


def test_mean_and_median_wait_by_size():
    frame = made_up()
    own = gpu_jobs(frame).dropna(subset="queue_s")
    with trace_of(frame) as trace:
        result = wait_by_size(trace)
    sizes = {"<1": own["gpu_num"] < 1, "3–4": own["gpu_num"] == 3, "33–64": own["gpu_num"] == 64}  # noqa: RUF001
    for label, rows in sizes.items():
        row, waits = rows_of(result.table, gpus=label).iloc[0], own[rows]["queue_s"]
        assert (row["n"], row["median_queue_s"]) == (len(waits), waits.median())
        assert row["mean_queue_s"] == pytest.approx(waits.mean())
    assert result.numbers["made_up.gpus_3_4.mean_queue_s"] == pytest.approx(
        own[own["gpu_num"] == 3]["queue_s"].mean()
    )
    assert [panel.y.label for panel in result.chart.panels] == [
        "mean queue time (s)",
        "median queue time (s)",
    ]


def test_waiting_while_enough_gpus_were_free():
    # Of 8 GPUs one is free on average in hour 0, two in hour 1.
    with trace_of(BY_HAND, clusters=[Cluster(name="Seren", source="test", gpu_num=8)]) as trace:
        result = waiting_while_free(trace)
    row = rows_of(result.table, gpus="2").iloc[0]
    assert (row["waited_h"], row["waited_while_free_h"]) == (pytest.approx(1.5), pytest.approx(0.5))
    assert result.numbers["seren.waiting.share_while_free"] == pytest.approx(1 / 3)
    assert result.numbers["seren.gpus_2.share_while_free"] == pytest.approx(1 / 3)


def test_without_capacity_types_pools_or_waiting_it_is_left_out():
    with trace_of(made_up().drop(columns=["type", "pool"])) as trace:
        for analysis in (waiting_while_free, who_waits_for_whom, who_waits_for_whom_by_pool):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
    with trace_of(made_up().assign(start_at=pd.NaT)) as trace:
        for analysis in (wait_by_size, who_waits_for_whom):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
