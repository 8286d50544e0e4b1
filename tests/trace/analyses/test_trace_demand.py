"""Compare requested resources with pandas on real jobs, and with published counts and boxes."""

import numpy as np
import pandas as pd
import pytest
from job_tables import assert_cdf, gpu_jobs, kalos, made_up, openb, philly, real, rows_of, trace_of

from holdfast.trace.analyses.demand import gpu_demand, gpu_demand_by_type, host_demand
from holdfast.trace.errors import LeftOut


@pytest.mark.parametrize("jobs", [philly, openb, kalos, made_up])
def test_gpus_of_jobs_by_jobs_and_by_gpu_time(jobs):
    frame = jobs()
    expected = gpu_jobs(frame)
    with trace_of(frame) as trace:
        result = gpu_demand(trace, large_gpus=8)
    ran = expected[expected["gpu_time_s"] > 0]
    by_jobs, by_time = (rows_of(result.table, weight=weight) for weight in ("jobs", "gpu_time"))
    assert_cdf(by_jobs, expected["gpu_num"], np.ones(len(expected)), "gpu_num")
    assert_cdf(by_time, ran["gpu_num"], ran["gpu_time_s"], "gpu_num")
    numbers = {key.partition(".gpu_job.")[2]: value for key, value in result.numbers.items()}
    gpus, time = expected["gpu_num"], ran["gpu_time_s"]
    assert numbers["mean_gpu_num"] == pytest.approx(gpus.mean())
    assert numbers["median_gpu_num"] == gpus.median()
    assert numbers["max_gpu_num"] == gpus.max()
    assert numbers["share_of_jobs_at_most_1_gpu"] == pytest.approx((gpus <= 1).mean())
    assert numbers["share_of_jobs_from_8_gpus"] == pytest.approx((gpus >= 8).mean(), abs=1e-12)
    assert numbers["share_of_gpu_time_from_8_gpus"] == pytest.approx(
        time[ran["gpu_num"] >= 8].sum() / time.sum(), abs=1e-12
    )


def test_the_published_counts_by_number_of_gpus_come_out_to_the_job():
    counts = pd.read_csv(real("acme_figure_curves/exact_gpu_num_cumulative_jobs.csv"))
    counts = counts[counts["cluster"].isin(["Seren", "Kalos"])]
    frames = [
        pd.DataFrame(
            {
                "cluster": name,
                "gpu_num": np.repeat(own["gpu_num_le"], np.diff(own["cum_jobs"], prepend=0)),
            }
        )
        for name, own in counts.groupby("cluster")
    ]
    with trace_of(*frames) as trace:
        result = gpu_demand(trace)
    for name, own in counts.groupby("cluster"):
        table = rows_of(result.table, cluster=name, weight="jobs").set_index("gpu_num")[
            "share_at_most"
        ]
        distinct = own.drop_duplicates("cum_jobs")  # A step without a job is no step.
        found = (table * own["n_total"].iloc[0]).round()
        assert found.tolist() == distinct["cum_jobs"].tolist()
        assert found.index.tolist() == distinct["gpu_num_le"].tolist()
    assert result.numbers["seren.gpu_job.share_of_jobs_at_most_1_gpu"] == pytest.approx(
        0.540, abs=0.0005
    )
    assert result.numbers["kalos.gpu_job.share_of_jobs_at_most_1_gpu"] == pytest.approx(
        0.863, abs=0.0005
    )


def test_boxes_by_type():
    from matplotlib.cbook import boxplot_stats

    frame = made_up()
    with trace_of(frame) as trace:
        result = gpu_demand_by_type(trace)
    assert result.table["type"].tolist() == ["Pretrain", "Evaluation", "SFT", "Other", "unknown"]
    expected = gpu_jobs(frame).fillna({"type": "unknown"})
    for row in result.table.df().itertuples():
        gpus = expected[expected["type"] == row.type]["gpu_num"]
        box = boxplot_stats(gpus, whis=1.5)[0]
        assert row.n == len(gpus)
        five = [box[name] for name in ("whislo", "q1", "med", "q3", "whishi")]
        assert list(row[-5:]) == pytest.approx(five)
    assert result.chart.panels[0].five.shape == (5, 5)


def test_the_box_of_kalos_pretraining_is_near_the_published_one():
    with trace_of(kalos()) as trace:
        numbers = gpu_demand_by_type(trace).numbers
    # The real sample holds the 183 completed of 641 jobs; its median is the published one.
    assert numbers["kalos.pretrain.median_gpu_num"] == 512
    assert numbers["kalos.pretrain.q3_gpu_num"] == 512


@pytest.mark.parametrize("jobs", [openb, made_up])
def test_cpus_and_memory_beside_a_gpu(jobs):
    frame = jobs()
    expected = gpu_jobs(frame)
    with trace_of(frame) as trace:
        result = host_demand(trace)
    for part, column in (("CPUs", "cpu_num"), ("memory (GB)", "mem_gb")):
        per_gpu = (expected[column] / expected["gpu_num"]).round(3).dropna()
        rows = rows_of(result.table, part=part, weight="jobs")
        # The two roundings of a half may differ in the last digit.
        shares = [(per_gpu <= x + 0.0005).mean() for x in rows["per_gpu"]]
        assert rows["share_at_most"].tolist() == pytest.approx(shares, abs=2e-3)
        assert rows["per_gpu"].iloc[-1] == pytest.approx(per_gpu.max(), abs=0.001)
    assert f"n = {expected['cpu_num'].notna().sum():,}" in result.caption


def test_without_gpus_types_or_host_columns_it_is_left_out():
    frame = made_up().drop(columns=["type", "cpu_num", "mem_gb"])
    with trace_of(frame) as trace:
        for analysis in (gpu_demand_by_type, host_demand):
            with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                analysis(trace)
    with (
        trace_of(made_up().assign(gpu_num=0.0)) as trace,
        pytest.raises(LeftOut, match="no GPU job"),
    ):
        gpu_demand(trace)
