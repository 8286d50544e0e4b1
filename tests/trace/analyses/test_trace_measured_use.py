"""Check utilisation and network against the study's released CDFs, and hours by hand."""

import csv
import statistics

import numpy as np
import pytest
from small_traces import SHARED_DATA, add_hours, add_values, trace_of

from holdfast.trace.analyses.utilisation import (
    cpu,
    gpu_utilisation,
    idle_by_hour_of_day,
    memory,
    network,
    sm_activity,
    utilisation_over_time,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

UTIL = SHARED_DATA / "acme_util"
SEREN = Cluster(name="Seren", source="acme", gpu_memory_mib=81920, utc_offset_h=8)
KALOS = Cluster(name="Kalos", source="acme", gpu_memory_mib=81920)
PHILLY = Cluster(name="Philly", source="philly")


def released(stem):
    path = UTIL / f"{stem}.csv"
    if not path.exists():
        pytest.skip("the study's released CDFs are not at hand")
    with path.open() as file:
        return [float(row["value"]) for row in csv.DictReader(file)]


@pytest.fixture
def trace(tmp_path):
    jobs = [{"cluster": name, "job_id": "1"} for name in ("Seren", "Kalos", "Philly")]
    with trace_of(
        tmp_path, jobs, clusters=[SEREN, KALOS, PHILLY], compared=frozenset({"Philly"})
    ) as made:
        yield made


def test_gpu_utilisation_is_polarised_as_published(trace):
    for name, stem in (("Seren", "seren"), ("Kalos", "kalos"), ("Philly", "philly")):
        add_values(trace, name, "GPU_UTIL", released(f"util_gpu_{stem}__GPU_UTIL_pct"))
    result = gpu_utilisation(trace)
    numbers = result.numbers
    for name, stem in (("seren", "seren"), ("kalos", "kalos"), ("philly", "philly")):
        values = released(f"util_gpu_{stem}__GPU_UTIL_pct")
        assert numbers[f"{name}.gpu_util.median_pct"] == pytest.approx(statistics.median(values))
        assert numbers[f"{name}.gpu_util.zero_share"] == pytest.approx(
            values.count(0.0) / len(values)
        )
        assert numbers[f"{name}.gpu_util.busy_share"] == pytest.approx(
            sum(v >= 95 for v in values) / len(values)
        )
    assert (numbers["seren.gpu_util.median_pct"], numbers["kalos.gpu_util.median_pct"]) == (99, 97)
    assert numbers["philly.gpu_util.median_pct"] == pytest.approx(48.4, abs=0.2)
    assert "any kernel" in result.caption
    # Every vertex of the curve is on the CDF of the data.
    values = np.sort(released("util_gpu_kalos__GPU_UTIL_pct"))
    kalos = result.table.where(cluster="Kalos")
    for value, share in zip(kalos["value_pct"], kalos["share_at_most"], strict=True):
        assert share == pytest.approx((values <= value).mean())
    (panel,) = result.chart.panels
    assert [series.role for series in panel.series] == ["main", "main", "compared"]


def test_sm_and_tensor_activity(trace):
    for name, stem in (("Seren", "seren"), ("Kalos", "kalos_full")):
        add_values(trace, name, "SM_ACTIVE", released(f"util_gpu_{stem}__SM_ACTIVE_pct"))
        add_values(trace, name, "PIPE_TENSOR_ACTIVE", released(f"util_gpu_{stem}__TC_ACTIVITY_pct"))
    result = sm_activity(trace)
    medians = [result.numbers[f"{name}.sm_active.median_pct"] for name in ("seren", "kalos")]
    assert medians == pytest.approx([50.16, 33.26], abs=0.01)  # the study: about 40 over both
    tensor = released("util_gpu_seren__TC_ACTIVITY_pct")
    assert result.numbers["seren.tensor_active.median_pct"] == pytest.approx(
        statistics.median(tensor)
    )
    assert len(result.chart.panels[0].series) == 4


def test_half_of_kalos_gpus_use_three_quarters_of_their_memory(trace):
    percent = released("util_gpu_kalos__FB_USED_pct")
    add_values(trace, "Kalos", "FB_USED", [value * 819.2 for value in percent])
    add_values(
        trace, "Kalos", "NODE_MEMORY_UTILIZATION", released("util_cpu_mem_kalos__HOST_MEM_pct")
    )
    add_values(trace, "Philly", "FB_USED", [1.0])  # a cluster of unknown GPU memory
    numbers = memory(trace).numbers
    assert numbers["kalos.gpu_memory.over_share"] == pytest.approx(
        sum(v > 75 for v in percent) / len(percent)
    )
    assert numbers["kalos.gpu_memory.over_share"] == pytest.approx(0.5, abs=0.01)
    assert numbers["kalos.gpu_memory.median_pct"] == pytest.approx(statistics.median(percent))
    assert numbers["kalos.host_memory.over_half_share"] < 0.02
    assert "philly.gpu_memory.median_pct" not in numbers


def test_infiniband_is_idle_over_60_percent_of_the_time(trace):
    send, receive = released("ib_seren__IB_SEND"), released("ib_seren__IB_RECEIVE")
    add_values(trace, "Seren", "NODE_IB_SEND", send)
    add_values(trace, "Seren", "NODE_IB_RECEIVE", receive)
    numbers = network(trace).numbers
    assert numbers["seren.ib_send.idle_share"] == pytest.approx(
        sum(v <= 0.01 * max(send) for v in send) / len(send)
    )
    assert numbers["seren.ib_send.idle_share"] > 0.6
    assert numbers["seren.ib_receive.heavy_share"] == pytest.approx(
        sum(v > 0.25 * max(receive) for v in receive) / len(receive)
    )


def test_cpu_and_what_is_missing(trace):
    add_values(trace, "Seren", "NODE_CPU_UTILIZATION", [0, 10, 30], [1, 2, 1])
    assert cpu(trace).numbers == {
        "seren.cpu.median_pct": 10, "seren.cpu.mean_pct": 12.5, "seren.cpu.zero_share": 0.25, "seren.cpu.samples": 4,
    }  # fmt: skip
    for analysis, missing in (
        (gpu_utilisation, "GPU_UTIL"),
        (sm_activity, "SM_ACTIVE"),
        (network, "InfiniBand"),
    ):
        with pytest.raises(LeftOut, match=missing):
            analysis(trace)
    with pytest.raises(LeftOut, match="FB_USED"):
        memory(trace)


def test_hours_on_the_clock_of_the_people(trace):
    rows = [
        ("Seren", "GPU_UTIL", f"2023-05-0{day} {hour:02d}:00:00", 100, 50.0 * 100, hour)
        for day in (1, 2)
        for hour in range(24)
    ]
    add_hours(trace, [*rows, ("Kalos", "GPU_UTIL", "2023-05-01 03:00:00", 10, 1000.0, 0)])
    over_time = utilisation_over_time(trace)
    assert over_time.numbers["seren.gpu_util.hourly_p5_pct"] == 50
    assert over_time.table.where(cluster="Kalos")["mean_pct"].tolist() == [100]
    of_day = idle_by_hour_of_day(trace)
    by_hour = {(cluster, hour): share for cluster, hour, _, share in of_day.table.rows()}
    assert by_hour["Seren", 7] == pytest.approx(
        0.23
    )  # 23:00 UTC is 07:00 of the next day in the cluster's local time
    assert by_hour["Seren", 8] == 0
    assert by_hour["Kalos", 3] == 0
    assert np.isnan(by_hour["Kalos", 4])
    assert "idle most at 07:00" in of_day.caption


def test_no_telemetry_at_all(trace):
    for analysis in (
        gpu_utilisation,
        sm_activity,
        memory,
        cpu,
        network,
        utilisation_over_time,
        idle_by_hour_of_day,
    ):
        with pytest.raises(LeftOut, match="no telemetry"):
            analysis(trace)
