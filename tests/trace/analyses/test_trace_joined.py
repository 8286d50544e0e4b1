"""Compare jobs joined with telemetry with a loop over every sample."""

from collections import defaultdict
from datetime import datetime, timedelta

import numpy as np
import pytest
from small_traces import add_devices, add_samples, add_values, trace_of

from holdfast.trace.analyses.joined import idle_by_user, job_utilisation, overallocation_by_user
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

START = datetime(2023, 5, 1)  # noqa: DTZ001 - times are UTC without a zone
CLUSTER = Cluster(name="X", source="made", gpu_memory_mib=80_000)


def job(number, user, start_min, end_min, gpu_num, **where):
    return {
        "cluster": "X", "job_id": str(number), "username": user, "type": "Debug", "gpu_num": gpu_num, **where,
        "start_at": START + timedelta(minutes=start_min), "end_at": START + timedelta(minutes=end_min),
    }  # fmt: skip


def devices(nodes, gpus_per_node):
    """List the GPUs, then the nodes."""
    rows = [
        ("X", node * gpus_per_node + gpu, f"n{node}-{gpu}", f"n{node}", gpu)
        for node in range(nodes)
        for gpu in range(gpus_per_node)
    ]
    return rows + [("X", len(rows) + node, f"n{node}", f"n{node}", None) for node in range(nodes)]


@pytest.fixture
def busy(tmp_path):
    """Make six hours of four nodes of two GPUs, with jobs that end in mid-hour, run for hours, or
    share.
    """
    dice = np.random.default_rng(7)
    jobs = [
        job(1, "ann", 3, 200, 2, nodes=["n0"]),
        job(2, "ann", 10, 12, 4, nodes=["n1", "n2"]),
        job(3, "bob", 20, 90, 1, nodes=["n3"]),  # one of two GPUs, unknown which
        job(4, "bob", 30, 80, 1, nodes=["n3"], gpus=["n3-1"]),
        job(5, "cid", 61, 359, 4, nodes=["n1", "n2"]),
        job(6, "cid", 200, 359, 2, nodes=["n0"]),
        job(7, "dan", 100, 100, 2, nodes=["n3"]),  # without duration
        job(8, "dan", 100, 190, 0, nodes=["n3"]),  # no GPU
    ]
    samples = [
        (
            "X",
            metric,
            str(START + timedelta(seconds=15 * k)),
            device,
            float(dice.choice([0, 0, 3, 50, 100])),
        )
        for metric, numbers in (
            ("GPU_UTIL", range(8)),
            ("SM_ACTIVE", range(8)),
            ("NODE_CPU_UTILIZATION", range(8, 12)),
        )
        for k in range(0, 6 * 240, 3)
        for device in numbers
    ]
    with trace_of(tmp_path, jobs, clusters=[CLUSTER]) as trace:
        add_devices(trace, devices(4, 2))
        add_samples(trace, samples)
        yield trace, jobs, samples


HELD = {"1": [0, 1], "2": [2, 3, 4, 5], "4": [7], "5": [2, 3, 4, 5], "6": [0, 1]}
"""GPUs of each job whose GPUs can be identified."""


def values_of(samples, metric, numbers, one):
    held = defaultdict(list)
    for _, name, at, device, value in samples:
        if (
            name == metric
            and device in numbers
            and one["start_at"] <= datetime.fromisoformat(at) < one["end_at"]
        ):
            held[device].append(value)
    return held


def test_each_sample_goes_to_the_job_that_held_its_gpu(busy):
    trace, jobs, samples = busy
    result = job_utilisation(trace)
    table = trace.query("SELECT * FROM agg_joined_use")
    for metric in ("GPU_UTIL", "SM_ACTIVE"):
        rows = table.where(metric=metric)
        assert sorted(rows["job_id"].tolist()) == sorted(HELD)
        for one in jobs:
            if one["job_id"] not in HELD:
                continue
            held = values_of(samples, metric, HELD[one["job_id"]], one)
            every = [value for values in held.values() for value in values]
            row = rows.where(job_id=one["job_id"])
            assert row["n"][0] == len(every)
            assert row["sum_value"][0] == pytest.approx(sum(every))
            assert row["n_idle"][0] == sum(value < 5 for value in every)
            assert row["n_unused"][0] == sum(max(values) < 5 for values in held.values())
    means = [
        np.mean(
            [
                v
                for values in values_of(samples, "GPU_UTIL", HELD[one["job_id"]], one).values()
                for v in values
            ]
        )
        for one in jobs
        if one["job_id"] in HELD
    ]
    assert result.numbers["x.job.gpu_util.median_pct"] == pytest.approx(np.median(means), abs=0.051)
    assert (
        result.numbers["x.job.gpu_util.debug.median_pct"]
        == result.numbers["x.job.gpu_util.median_pct"]
    )
    assert "1 of 6 GPU jobs are left out" in result.caption


def test_a_nodes_cpus_are_a_jobs_where_it_is_alone(busy):
    trace, jobs, samples = busy
    job_utilisation(trace)
    rows = trace.query("SELECT * FROM agg_joined_use WHERE metric = 'NODE_CPU_UTILIZATION'")
    # Jobs 3 and 4 overlap on n3; job 8 had n3 alone; job 1 ended when job 6 began.
    assert sorted(rows["job_id"].tolist()) == ["1", "2", "5", "6", "8"]
    (held,) = values_of(samples, "NODE_CPU_UTILIZATION", [11], jobs[7]).values()
    assert rows.where(job_id="8")["sum_value"][0] == pytest.approx(sum(held))


def test_idle_gpu_hours_by_user(busy):
    trace, jobs, samples = busy
    result = idle_by_user(trace)
    wanted = defaultdict(float)
    held_h = 0.0
    for one in jobs:
        if one["job_id"] in HELD:
            held = values_of(samples, "GPU_UTIL", HELD[one["job_id"]], one)
            every = [value for values in held.values() for value in values]
            hours = one["gpu_num"] * (one["end_at"] - one["start_at"]).total_seconds() / 3600
            wanted[one["username"]] += hours * sum(value < 5 for value in every) / len(every)
            held_h += hours
    assert dict(
        zip(result.table["username"], result.table["idle_gpu_time_h"], strict=True)
    ) == pytest.approx(wanted)
    assert result.numbers["x.allocated.idle_share"] == pytest.approx(sum(wanted.values()) / held_h)
    assert idle_by_user(trace, top=1).table["username"].tolist() == [
        max(wanted, key=wanted.__getitem__)
    ]
    assert idle_by_user(trace, top=1).numbers == result.numbers


def test_never_used_gpus_and_memory(tmp_path):
    jobs = [
        job(1, "ann", 0, 60, 2, gpus=["n0-0", "n0-1"]),
        job(2, "bob", 0, 30, 2, gpus=["n1-0", "n1-1"]),
    ]
    with trace_of(tmp_path, jobs, clusters=[CLUSTER]) as trace:
        add_devices(trace, devices(2, 2))
        used = {0: 90.0, 1: 4.0, 2: 0.0, 3: 0.0}
        add_samples(
            trace, [("X", "GPU_UTIL", str(START), gpu, value) for gpu, value in used.items()]
        )
        add_samples(
            trace,
            [("X", "FB_USED", str(START), 0, 40_000.0), ("X", "FB_USED", str(START), 1, 100.0)],
        )
        add_samples(trace, [("X", "NODE_MEMORY_UTILIZATION", str(START), 4, 12.5)])
        result = overallocation_by_user(trace)
        idle = idle_by_user(trace)
    ann, bob = (dict(zip(result.table.columns, row, strict=True)) for row in result.table.rows())
    assert (ann["username"], ann["unused_gpus_share"], ann["peak_gpu_memory_share"]) == (
        "ann",
        0.5,
        0.5,
    )
    assert ann["host_memory_pct"] == 12.5  # The names of the GPUs identify the node.
    assert bob["unused_gpus_share"] == 1
    assert np.isnan(bob["peak_gpu_memory_share"])
    assert np.isnan(bob["cpu_pct"])
    assert result.numbers["x.allocated.unused_gpus_share"] == pytest.approx((1 + 1) / 3)
    assert idle.numbers["x.allocated.never_used_jobs"] == 1


def test_left_out_with_a_sentence(tmp_path):
    with trace_of(tmp_path, [job(1, "ann", 0, 60, 2)]) as trace:
        with pytest.raises(LeftOut, match="no telemetry"):
            job_utilisation(trace)
        add_values(trace, "X", "GPU_UTIL", [1.0])
        with pytest.raises(LeftOut, match="convert it to a store"):
            job_utilisation(trace)
        add_devices(trace, devices(1, 2))
        add_samples(trace, [("X", "GPU_UTIL", str(START), 0, 1.0)])
        with pytest.raises(LeftOut, match="do not name their nodes"):
            idle_by_user(trace)
    for node, said in (("172.31.0.1", "has none"), ("n0", "shares its")):
        # Two GPUs on two nodes of two: as many as one node has, but not all of both.
        with trace_of(tmp_path / node, [job(1, "ann", 0, 60, 2, nodes=[node, "n1"])]) as trace:
            add_devices(trace, devices(2, 2)[:4] if node == "n0" else devices(1, 2)[:2])
            add_samples(trace, [("X", "GPU_UTIL", str(START), 0, 1.0)])
            with pytest.raises(LeftOut, match=said):
                overallocation_by_user(trace)
