"""Find a planted bad node in a made-up cluster, and analyze the 852 real Xid onsets of Kalos."""

import csv
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from small_traces import SHARED_DATA, add_devices, add_hours, add_onsets, trace_of

from holdfast.trace.analyses.nodes import failing_nodes, xid_errors
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

ONSETS = SHARED_DATA / "acme_kalos_xid/xid_onsets.csv"


def job(number, nodes, state="COMPLETED", hours=1.0):
    return {
        "cluster": "X",
        "job_id": str(number),
        "nodes": nodes,
        "state": state,
        "run_s": 3600 * hours,
        "gpu_num": 8,
    }


def test_a_planted_lemon_is_found_and_a_host_of_large_jobs_is_not_blamed(tmp_path):
    names = [f"n{n:02d}" for n in range(50)]
    jobs = [job(f"{name}-{n}", [name]) for name in names for n in range(40)]
    jobs += [job(f"small-{n}", [names[n]], "NODE_FAIL") for n in range(10)]  # one each, by chance
    jobs += [job(f"lemon-{n}", ["n30"], "NODE_FAIL") for n in range(8)]
    # Jobs of four nodes run on two sets of nodes and fail half of the time on each.
    for n in range(20):
        jobs.append(
            job(
                f"large-{n}",
                names[40:44] if n % 2 else names[44:48],
                "NODE_FAIL" if n % 4 < 2 else "COMPLETED",
            )
        )
    with trace_of(tmp_path, jobs) as trace:
        result = failing_nodes(trace)
    found = [row[1] for row in result.table.rows() if row[-1]]
    assert found == ["n30"]
    first = dict(zip(result.table.columns, next(iter(result.table.rows())), strict=True))
    assert first["node"] == "n30"
    assert first["failures"] == 8
    # 18 failures in 50 x 40 + 18 hours of jobs on one node; 48 of these hours on the bad node.
    assert first["expected"] == pytest.approx(48 * 18 / 2018)
    assert result.numbers["x.nodes.standing_out"] == 1
    host = result.table.where(node="n41")
    assert host["failures"][0] == 5
    assert host["expected"][0] == pytest.approx(40 * 18 / 2018 + 5)


def test_all_failures_are_taken_where_none_is_the_infrastructures(tmp_path):
    jobs = [job(n, ["a" if n % 2 else "b"]) for n in range(20)] + [
        job(100 + n, ["b"], "FAILED") for n in range(2)
    ]
    with trace_of(tmp_path, jobs) as trace:
        result = failing_nodes(trace)
        assert result.numbers["x.nodes.standing_out"] == 0
        assert result.table["failures"].tolist() == [2, 0]
        assert "of the failures on nodes" in result.caption
    with (
        trace_of(tmp_path / "b", [job(1, ["a"])]) as trace,
        pytest.raises(LeftOut, match="list of nodes failed"),
    ):
        failing_nodes(trace)
    with (
        trace_of(
            tmp_path / "c", [{"cluster": "X", "job_id": "1", "state": "FAILED", "run_s": 1.0}]
        ) as trace,
        pytest.raises(LeftOut, match="no nodes"),
    ):
        failing_nodes(trace)


@pytest.fixture
def kalos(tmp_path):
    if not ONSETS.exists():
        pytest.skip("Kalos' Xid onsets are not at hand")
    with ONSETS.open() as file:
        onsets = list(csv.DictReader(file))
    gpus = {name: number for number, name in enumerate(dict.fromkeys(row["gpu"] for row in onsets))}
    with trace_of(tmp_path, [], clusters=[Cluster(name="Kalos", source="made")]) as trace:
        devices = []
        for name, number in gpus.items():
            node, index = name.split("#")
            devices.append(("Kalos", number, f"{node}-{index}", node, int(index)))
        add_devices(trace, devices)
        at = [
            datetime.fromisoformat(row["t"]).astimezone(UTC).replace(tzinfo=None) for row in onsets
        ]
        add_onsets(
            trace,
            [
                ("Kalos", gpus[row["gpu"]], when, int(row["code"]))
                for row, when in zip(onsets, at, strict=True)
            ],
        )
        yield trace, onsets, at


def test_real_xid_onsets_of_kalos(kalos):
    trace, onsets, at = kalos
    result = xid_errors(trace, gpu_hours=882_506)
    numbers = result.numbers
    assert numbers["kalos.xid.onsets"] == len(onsets) == 852
    assert {code: numbers[f"kalos.xid.code_{code}.onsets"] for code in (43, 31, 94, 45)} == {
        43: 794,
        31: 55,
        94: 2,
        45: 1,
    }
    assert (numbers["kalos.xid.gpus"], numbers["kalos.xid.nodes"]) == (851, 142)
    assert numbers["kalos.xid.gpu_h_per_onset"] == pytest.approx(1036, abs=0.5)
    days = {value: n for _, split, value, n in result.table.rows() if split == "day"}
    assert days == Counter(str(when.date()) for when in at)
    nodes = {value: n for _, split, value, n in result.table.rows() if split == "node"}
    assert nodes == Counter(row["gpu"].split("#")[0] for row in onsets)


def test_bursts_of_kalos_are_those_of_a_plain_loop(kalos):
    trace, onsets, at = kalos
    events = sorted((when, row["gpu"]) for when, row in zip(at, onsets, strict=True))
    bursts = [[events[0]]]
    for event in events[1:]:
        if event[0] - bursts[-1][-1][0] > timedelta(seconds=60):
            bursts.append([])
        bursts[-1].append(event)
    largest = max(bursts, key=len)
    numbers = xid_errors(trace, gpu_hours=882_506).numbers
    assert numbers["kalos.xid.bursts"] == len(bursts)
    assert numbers["kalos.xid.largest_burst.onsets"] == len(largest)
    assert numbers["kalos.xid.largest_burst.nodes"] == len(
        {gpu.split("#")[0] for _, gpu in largest}
    )
    # The data's own description names this burst: 115 GPUs of 78 nodes within 15 seconds.
    close = xid_errors(trace, gpu_hours=882_506, burst_gap_s=15).numbers
    assert close["kalos.xid.largest_burst.onsets"] >= 115


def test_gpu_hours_are_gpus_times_the_hours_with_telemetry(kalos):
    trace, *_ = kalos
    ends = ("2023-08-15 07:00:00", "2023-08-19 10:00:00")
    add_hours(trace, [("Kalos", "XID_ERRORS", hour, 1, 0.0, 1) for hour in ends])
    assert xid_errors(trace).numbers["kalos.xid.gpu_h_per_onset"] == pytest.approx(851 * 100 / 852)


def test_xid_left_out(tmp_path):
    with trace_of(tmp_path, [job(1, ["a"])]) as trace:
        with pytest.raises(LeftOut, match="no telemetry"):
            xid_errors(trace)
        add_onsets(trace, [])
        trace.metrics = frozenset({"GPU_UTIL"})
        with pytest.raises(LeftOut, match="no telemetry of XID_ERRORS"):
            xid_errors(trace)
        trace.metrics = frozenset({"XID_ERRORS"})
        with pytest.raises(LeftOut, match="XID_ERRORS was measured, and no Xid error"):
            xid_errors(trace)
