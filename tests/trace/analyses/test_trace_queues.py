"""Compare CDFs of queue times by every split with pandas, and with the counts behind published
curves.
"""

import numpy as np
import pandas as pd
import pytest
from job_tables import assert_cdf, gpu_jobs, made_up, openb, published, rows_of, trace_of

from holdfast.trace.analyses.queues import (
    queue,
    queue_by_pool,
    queue_by_size,
    queue_by_type,
    queues,
)
from holdfast.trace.errors import LeftOut

BUCKETS = {
    "<1": (0, 0.999),
    "1": (1, 1),
    "2": (2, 2),
    "3–4": (3, 4),  # noqa: RUF001
    "5–8": (5, 8),  # noqa: RUF001
    "9–16": (9, 16),  # noqa: RUF001
    "33–64": (33, 64),  # noqa: RUF001
}


def waited(frame):
    return gpu_jobs(frame).dropna(subset="queue_s")


@pytest.mark.parametrize("jobs", [openb, made_up])
def test_queue_times_are_those_of_the_jobs(jobs):
    frame = jobs()
    expected = waited(frame)
    with trace_of(frame) as trace:
        result = queue(trace)
    assert_cdf(
        rows_of(result.table, weight="jobs"), expected["queue_s"], np.ones(len(expected)), "queue_s"
    )
    ran = expected[expected["gpu_time_s"] > 0]
    assert_cdf(
        rows_of(result.table, weight="gpu_time"), ran["queue_s"], ran["gpu_time_s"], "queue_s"
    )
    key = frame["cluster"].iloc[0].lower().replace(" ", "_")
    assert result.numbers[f"{key}.gpu_job.median_queue_s"] == expected["queue_s"].median()
    assert result.numbers[f"{key}.gpu_job.mean_queue_s"] == pytest.approx(
        expected["queue_s"].mean()
    )
    of_cpu = frame[frame["gpu_num"] == 0]
    cpu_s = (of_cpu["start_at"] - of_cpu["submit_at"]).dt.total_seconds().dropna()
    assert result.numbers[f"{key}.cpu_job.n_with_queue_s"] == len(cpu_s)
    assert result.numbers[f"{key}.cpu_job.mean_queue_s"] == pytest.approx(cpu_s.mean())


def test_the_published_curves_by_type_come_out_to_the_job():
    curves, frames = published("queue_s")
    with trace_of(*frames.values()) as trace:
        for (cluster, kind), rows in curves.groupby(["cluster", "type"]):
            if kind.startswith("ALL"):
                continue
            jobs = queues(trace, cluster, parts=[kind]).jobs
            assert jobs.total == rows["n_total"].iloc[0]
            assert (
                np.round(jobs.at_most(rows["x_le"]) * jobs.total).tolist()
                == rows["cum_count"].tolist()
            )
        numbers = queue_by_type(trace).numbers
    assert numbers["seren.evaluation.n_with_queue_s"] == 292_212


def test_by_type_size_and_pool():
    frame = made_up()
    expected = waited(frame)
    with trace_of(frame) as trace:
        by_type, by_size, by_pool = queue_by_type(trace), queue_by_size(trace), queue_by_pool(trace)
    for kind, own in expected.fillna({"type": "unknown"}).groupby("type"):
        assert_cdf(
            rows_of(by_type.table, part=kind, weight="jobs"),
            own["queue_s"],
            np.ones(len(own)),
            "queue_s",
        )
    assert list(dict.fromkeys(by_size.table["part"])) == list(BUCKETS)
    for label, (low, high) in BUCKETS.items():
        own = expected[expected["gpu_num"].between(low, high)]
        assert_cdf(
            rows_of(by_size.table, part=label, weight="jobs"),
            own["queue_s"],
            np.ones(len(own)),
            "queue_s",
        )
    for pool, own in expected.fillna({"pool": "unknown"}).groupby("pool"):
        assert_cdf(
            rows_of(by_pool.table, part=pool, weight="jobs"),
            own["queue_s"],
            np.ones(len(own)),
            "queue_s",
        )
        assert by_pool.numbers[f"made_up.pool_{pool}.n_with_queue_s"] == len(own)
    below = expected[expected["gpu_num"] < 1]["queue_s"]
    assert by_size.numbers["made_up.gpus_below_1.mean_queue_s"] == pytest.approx(below.mean())
    eight = expected[expected["gpu_num"] == 8]["queue_s"]
    assert by_size.numbers["made_up.gpus_5_8.median_queue_s"] == eight.median()


def test_pools_beyond_the_most_used_are_one():
    frame = made_up()
    expected = waited(frame).fillna({"pool": "unknown"})
    ranked = (
        expected["pool"]
        .value_counts()
        .sort_index()
        .sort_values(ascending=False, kind="stable")
        .index
    )
    with trace_of(frame) as trace:
        result = queue_by_pool(trace, most=2)
    others = expected[expected["pool"].isin(ranked[2:])]["queue_s"]
    assert list(dict.fromkeys(result.table["part"])) == [*ranked[:2], "others"]
    assert result.numbers["made_up.pool_others.n_with_queue_s"] == len(others)
    assert result.numbers["made_up.pool_others.mean_queue_s"] == pytest.approx(others.mean())


def test_the_caption_names_who_waits_longest_on_average():
    frame = made_up()
    means = waited(frame).fillna({"type": "unknown"}).groupby("type")["queue_s"].mean()
    with trace_of(frame) as trace:
        caption = queue_by_type(trace).caption
    assert f"{means.idxmax()} waits longest" in caption
    assert f"{means.idxmin()} least" in caption


def test_a_cluster_without_a_split_is_not_in_it():
    own, other = made_up(), made_up(cluster="Other").drop(columns=["type", "pool"])
    with trace_of(own, other) as trace:
        assert set(queue_by_type(trace).table["cluster"]) == {"Made up"}
        assert set(queue_by_pool(trace).table["cluster"]) == {"Made up"}
        assert set(queue_by_size(trace).table["cluster"]) == {"Made up", "Other"}


def test_without_both_times_it_is_left_out():
    with trace_of(made_up().assign(start_at=pd.NaT)) as trace:
        for analysis in (queue, queue_by_type, queue_by_size, queue_by_pool):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
