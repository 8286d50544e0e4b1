"""Compare the two opening tables with pandas."""

import numpy as np
import pandas as pd
import pytest
from job_tables import gpu_jobs, kalos, made_up, openb, philly, real, trace_of

from holdfast.trace.analyses.summary import COMPARISON_COLUMNS, cluster_table, comparison_table
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

STATES = {"complete": ["COMPLETED"], "cancel": ["CANCELLED"], "preempt": ["PREEMPTED"]} | {
    "fail": ["FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"]
}
ENDED = [state for states in STATES.values() for state in states]


def test_clusters_as_they_are_known():
    known = Cluster(
        name="Made up", source="test", node_num=286, gpus_per_node=8, gpu_model="A100", gpu_memory_mib=81920.0,
        citation="nobody",
    )  # fmt: skip
    frame, other = made_up(), kalos()
    with trace_of(other, frame, clusters=[known], compared=["Kalos"]) as trace:
        result = cluster_table(trace)
    assert result.chart is None
    row, compared = (
        dict(zip(result.table.columns, row, strict=True)) for row in result.table.rows()
    )
    assert (row["cluster"], row["nodes"], row["gpus"], row["gpu_memory_gib"]) == (
        "Made up",
        286,
        2288,
        80,
    )
    assert (row["jobs"], row["gpu_jobs"]) == (len(frame), (frame["gpu_num"] > 0).sum())
    assert row["gpu_time_h"] == pytest.approx(gpu_jobs(frame)["gpu_time_s"].sum() / 3600)
    assert row["first_submission"] == frame["submit_at"].min().isoformat()
    assert row["last_submission"] == frame["submit_at"].max().isoformat()
    assert row["days"] == pytest.approx(
        (frame["submit_at"].max() - frame["submit_at"].min()) / pd.Timedelta("1D")
    )
    assert (row["compared"], compared["compared"]) == ("no", "yes")
    assert np.isnan(compared["nodes"])
    assert np.isnan(row["gpu_tdp_w"])


@pytest.mark.parametrize("jobs", [philly, openb, kalos, made_up])
def test_the_comparison_is_what_is_counted(jobs):
    frame = jobs()
    with trace_of(frame) as trace:
        result = comparison_table(trace)
    row = dict(zip(result.table.columns, next(result.table.rows()), strict=True))
    gpu = gpu_jobs(frame)
    cpu = gpu_jobs(frame.assign(gpu_num=1.0)[frame["gpu_num"] == 0])
    expected = {
        "job_num": len(frame),
        "cpu_job_num": len(cpu),
        "gpu_job_num": len(gpu),
        "avg_gpu_num": gpu["gpu_num"].mean(),
        "med_gpu_num": gpu["gpu_num"].median(),
        "max_gpu_num": gpu["gpu_num"].max(),
        "max_run_time_gpu_s": gpu["run_s"].max(),
    }
    for kind, own in (("gpu", gpu), ("cpu", cpu)):
        expected |= {
            f"avg_run_time_{kind}_s": own["run_s"].mean(),
            f"med_run_time_{kind}_s": own["run_s"].median(),
        }
        if "queue_s" in own:
            expected |= {
                f"avg_queue_time_{kind}_s": own["queue_s"].mean(),
                f"med_queue_time_{kind}_s": own["queue_s"].median(),
            }
        if "state" in own:
            ended = own[own["state"].isin(ENDED)]
            for name, states in STATES.items():
                if len(ended):
                    expected[f"{name}_rate_{kind}"] = ended["state"].isin(states).mean()
    if "state" in gpu:
        ended = gpu[gpu["state"].isin(ENDED)]
        for name, states in STATES.items():
            seconds = ended[ended["state"].isin(states)]["gpu_time_s"].sum()
            expected[f"{name}_gpu_time_s"] = seconds
            expected[f"{name}_rate_gpu_time"] = seconds / ended["gpu_time_s"].sum()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, nan_ok=True), name
    for name in set(COMPARISON_COLUMNS) - set(expected) - {"cluster"}:
        assert np.isnan(row[name]), name
    assert not np.isnan(list(result.numbers.values())).any()


def test_jobs_without_a_run_time_are_said_to_have_none():
    frame = made_up()
    frame["end_at"] = frame["run_s"] = np.nan
    with trace_of(frame) as trace:
        caption = comparison_table(trace).caption
    assert "GPU jobs, none of a known run time." in caption
    assert "nan" not in caption


def test_its_columns_are_those_of_the_published_summary():
    published = pd.read_csv(real("acme_cluster_summary/cluster_summary.csv"), nrows=0).columns
    ours = {name.removesuffix("_s") for name in COMPARISON_COLUMNS}
    named = {name.replace("_que_", "_queue_") for name in published} - {"id", "max_gpu"}
    assert named | {"max_gpu_num"} <= ours


def test_nothing_is_left_out():
    with trace_of(made_up(rows=1)) as trace:
        trace.connection.execute("DELETE FROM jobs_0")
        for analysis in (cluster_table, comparison_table):
            with pytest.raises(LeftOut, match="no job"):
                analysis(trace)
