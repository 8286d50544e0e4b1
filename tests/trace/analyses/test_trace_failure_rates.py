"""Compare rates, time to failure, completion and expected ETTR by size with arithmetic by hand."""

import math

import numpy as np
import pytest
from small_traces import trace_of

from holdfast.core.ledger import Attempt, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.trace.analyses.failure_rates import (
    completion_by_size,
    failure_rate_by_size,
    time_to_failure_by_size,
)
from holdfast.trace.analyses.progress import (
    ettr_bound,
    expected_ettr,
    expected_ettr_by_size,
    measured_ettr,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut
from holdfast.trace.loading import load

CLUSTER = Cluster(name="X", source="made", gpus_per_node=8)


def jobs(rows):
    """Make jobs from (state, GPUs, hours)."""
    return [
        {
            "cluster": "X",
            "job_id": str(n),
            "state": state,
            "gpu_num": gpus,
            "run_s": 3600 * hours,
            "reason": None,
        }
        for n, (state, gpus, hours) in enumerate(rows)
    ]


ROWS = [
    ("COMPLETED", 1, 100), ("FAILED", 1, 50), ("FAILED", 1, 50),
    ("COMPLETED", 6, 10), ("NODE_FAIL", 8, 15),
    ("CANCELLED", 64, 20), ("TIMEOUT", 64, 20),
    ("RUNNING", 64, 1000), ("COMPLETED", 0, 1000),
]  # fmt: skip


def lines(result, **equal):
    table = result.table.where(**equal)
    return {
        row[table_index(result, "gpus")]: dict(zip(table.columns, row, strict=True))
        for row in table.rows()
    }


def table_index(result, name):
    return list(result.table.columns).index(name)


def test_jobs_that_all_ended_as_they_began_have_no_rate_and_no_warning(tmp_path):
    with trace_of(
        tmp_path, jobs([("FAILED", 8, 0), ("COMPLETED", 8, 0)]), clusters=[CLUSTER]
    ) as trace:
        result = failure_rate_by_size(trace)
    assert not math.isfinite(lines(result, failures="all")[8]["per_1000_gpu_h"])


def test_failure_rates_by_size(tmp_path):
    with trace_of(tmp_path, jobs(ROWS), clusters=[CLUSTER]) as trace:
        result = failure_rate_by_size(trace)
    everything = lines(result, failures="all")
    assert set(everything) == {
        1,
        8,
        64,
    }  # Powers of two; 6 GPUs are in 5-8; the running job does not count.
    assert everything[1]["per_1000_gpu_h"] == pytest.approx(1000 * 2 / 200)
    assert everything[8]["gpu_time_h"] == 60 + 120
    assert everything[64]["gpu_time_h"] == 64 * 40
    # 1 failure: Garwood's 0.0253 to 5.5716.
    assert everything[64]["low"] == pytest.approx(1000 * 0.0253 / 2560, rel=2e-3)
    assert everything[64]["high"] == pytest.approx(1000 * 5.5716 / 2560, rel=1e-4)
    assert everything[64]["per_1000_node_days"] == pytest.approx(1000 / (2560 / 8 / 24))
    assert lines(result, failures="infrastructure")[8]["number"] == 1
    assert lines(result, failures="infrastructure")[64]["number"] == 0
    assert result.numbers["x.all.failures_per_1000_gpu_h"] == pytest.approx(1000 * 4 / 2940)
    assert result.numbers["x.infrastructure.failures_per_1000_node_days"] == pytest.approx(
        1000 / (2940 / 192)
    )


def test_time_to_failure_and_the_line_of_a_constant_rate(tmp_path):
    with trace_of(tmp_path, jobs(ROWS), clusters=[CLUSTER]) as trace:
        result = time_to_failure_by_size(trace)
        large = time_to_failure_by_size(trace, fit_least_gpus=8)
    everything = lines(result, failures="all")
    assert everything[1]["mttf_h"] == 100
    assert everything[8]["mttf_h"] == 25
    assert everything[64]["mttf_h"] == 40
    assert everything[64]["constant_rate_h"] == pytest.approx(2940 / 4 / 64)
    assert lines(large, failures="all")[64]["constant_rate_h"] == pytest.approx(
        (2940 - 200) / 2 / 64
    )
    infrastructure = lines(result, failures="infrastructure")
    assert math.isinf(infrastructure[64]["mttf_h"])
    # No failure in 40 h: at least 40 h over the upper limit of 0 events at 90%, -ln 0.05.
    assert infrastructure[64]["low_h"] == pytest.approx(40 / -math.log(0.05))
    assert math.isinf(infrastructure[64]["high_h"])
    assert result.numbers["x.infrastructure.gpu_mttf_h"] == 2940


def test_unknown_causes_are_said_where_they_are_most(tmp_path):
    known = [("NODE_FAIL", 8, 1), ("FAILED", 8, 1)]
    with trace_of(tmp_path / "a", jobs(known)) as trace:
        assert "no recorded cause" not in time_to_failure_by_size(trace).caption
    with trace_of(tmp_path / "b", jobs([*known, ("FAILED", 8, 1)])) as trace:
        for analysis in (failure_rate_by_size, time_to_failure_by_size, expected_ettr_by_size):
            assert "no recorded cause (66.7% in X)" in analysis(trace).caption


def test_completion_by_size(tmp_path):
    with trace_of(tmp_path, jobs([("COMPLETED", 4, 1)] * 81 + [("FAILED", 3, 1)] * 182)) as trace:
        result = completion_by_size(trace)
    ((_, gpus, number, completed, share, low, high),) = result.table.rows()
    assert (gpus, number, completed) == (4, 263, 81)
    assert (share, low, high) == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(
    ("mttf_h", "interval_h", "restart_h", "queue_h"), [(20, 0.5, 0.1, 0), (40, 1, 0.25, 2)]
)
def test_expected_ettr_is_what_a_run_of_many_failures_gets(mttf_h, interval_h, restart_h, queue_h):
    # Simulate: restart, train, fail at a constant rate, return to the last checkpoint, wait.
    held_h = np.random.default_rng(1).exponential(mttf_h, 20_000)
    trained_h = np.maximum(held_h - restart_h, 0)
    saved_h = np.floor(trained_h / interval_h) * interval_h
    lived = saved_h.sum() / (held_h + queue_h).sum()
    found = expected_ettr(
        mttf_h, checkpoint_interval_h=interval_h, restart_h=restart_h, queue_h=queue_h
    )
    assert found == pytest.approx(lived, abs=0.001)


def test_expected_ettr_halves_with_a_wait_as_long_as_the_time_between_failures():
    without = expected_ettr(10, checkpoint_interval_h=1, restart_h=0.1)
    assert expected_ettr(10, checkpoint_interval_h=1, restart_h=0.1, queue_h=10) == pytest.approx(
        without / 2
    )
    assert expected_ettr(0.1, checkpoint_interval_h=1, restart_h=0.1) == 0


def test_expected_ettr_takes_the_infrastructures_rate(tmp_path):
    with trace_of(tmp_path, jobs(ROWS), clusters=[CLUSTER]) as trace:
        result = expected_ettr_by_size(trace, checkpoint_intervals_h=(0.5,), restart_h=0.1)
    lost = 16 / 2940 * (0.1 + 0.25)
    assert result.numbers["x.expected_ettr.30_min.16_gpus"] == pytest.approx(1 - lost)
    assert result.table["mttf_h"][0] == pytest.approx(2940 / 8)
    with (
        trace_of(tmp_path / "b", jobs([("FAILED", 8, 1)])) as trace,
        pytest.raises(LeftOut, match="infrastructure's"),
    ):
        expected_ettr_by_size(trace)


def test_bound_of_ettr_counts_what_was_not_saved_and_the_waits(tmp_path):
    def job(number, state, submit, start, end, **more):
        return {
            "cluster": "X", "job_id": number, "username": "a", "state": state, "gpu_num": 16, "reason": None,
            "submit_at": f"2023-05-01 {submit}", "start_at": f"2023-05-01 {start}", "end_at": f"2023-05-01 {end}",
            **more,
        }  # fmt: skip

    rows = [
        job(
            "1", "FAILED", "00:00", "00:00", "01:40", run_s=6000
        ),  # 10 min since the last save at 01:30
        job("2", "CANCELLED", "01:50", "02:00", "04:00", run_s=7200),  # continues after 20 min
        job(
            "3", "NODE_FAIL", "05:00", "05:00", "05:20", run_s=1200
        ),  # never saved, and nothing follows
        job("4", "FAILED", "05:00", "05:00", "05:20", run_s=1200, gpu_num=8),  # too small to count
    ]
    with trace_of(tmp_path, rows) as trace:
        result = ettr_bound(trace)
        hourly = ettr_bound(trace, checkpoint_interval_h=1)
        small = ettr_bound(trace, least_gpus=1)
        soon = ettr_bound(trace, restart_within_h=0.25)
    held, lost, waited = 6000 + 7200 + 1200, 600 + 1200, 1200
    assert result.numbers["x.ettr_bound"] == pytest.approx(1 - lost / held)
    assert result.numbers["x.ettr_with_waits"] == pytest.approx((held - lost) / (held + waited))
    assert soon.numbers["x.ettr_with_waits"] == pytest.approx((held - lost) / held)
    assert hourly.numbers["x.ettr_bound"] == pytest.approx(1 - (2400 + 1200) / held)
    assert small.numbers["x.ettr_bound.8_gpus"] == 0
    (row,) = result.table.rows()
    assert row[:5] == ("X", 16, *(pytest.approx(16 * s / 3600) for s in (held, lost, waited)))
    assert "upper bound" in result.caption


def test_bound_has_no_waits_where_they_are_unknown(tmp_path):
    with trace_of(tmp_path, jobs(ROWS)) as trace:
        result = ettr_bound(trace)
        assert "x.ettr_with_waits" not in result.numbers
        assert list(result.chart.panels[0].parts) == ["at most"]
        with pytest.raises(LeftOut, match="at least 128 GPUs"):
            ettr_bound(trace, least_gpus=128)


def test_ettr_of_runs_is_that_of_their_accounting(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        # Make a run of ten one-second steps after a start of two seconds, and a run that lost half
        # of its steps without a save.
        for run_id, wall_s, attempts in (
            ("good", 12.0, [(0.0, 10)]),
            ("bad", 24.0, [(0.0, 10), (12.0, 10)]),
        ):
            ledger.add_run(
                Run(
                    run_id=run_id, state="completed", command=["x"], options={}, cwd="/", host="h", pid=1,
                    started_at_s=1000.0, ended_at_s=1000.0 + wall_s,
                )
            )  # fmt: skip
            journal = StepJournal(RunPaths(tmp_path, run_id).steps)
            for number, (start_s, steps) in enumerate(attempts, start=1):
                ledger.add_attempt(
                    Attempt(run_id=run_id, number=number, started_at_s=1000.0 + start_s)
                )
                for step in range(1, steps + 1):
                    at_s = 1000.0 + start_s + 2 + step
                    journal.append(
                        StepRecord(attempt=number, rank=0, step=step, at_s=at_s, step_s=1.0)
                    )
            journal.close()
    with load(tmp_path / "ledger.db") as trace:
        result = measured_ettr(trace)
        assert len(measured_ettr(trace, most=1).chart.panels[0].groups) == 1
    ettr = dict(zip(result.table["run"], result.table["ettr"], strict=True))
    assert ettr == {"good": pytest.approx(10 / 12), "bad": pytest.approx(10 / 24)}
    assert result.numbers["ettr"] == pytest.approx(20 / 36)
    causes = [name for name in result.table.columns if name.endswith("_s") and name != "wall_s"]
    for row in range(2):
        assert sum(result.table[name][row] for name in causes) == pytest.approx(
            result.table["wall_s"][row]
        )


def test_left_out_without_states_or_runs(tmp_path):
    with trace_of(
        tmp_path, [{"cluster": "X", "job_id": "1", "gpu_num": 1, "state": "PENDING", "run_s": None}]
    ) as trace:
        with pytest.raises(LeftOut, match="no ledger"):
            measured_ettr(trace)
        for analysis in (failure_rate_by_size, completion_by_size, expected_ettr_by_size):
            with pytest.raises(LeftOut, match="no GPU job"):
                analysis(trace)
    with (
        trace_of(tmp_path / "b", [{"cluster": "X", "job_id": "1"}]) as trace,
        pytest.raises(LeftOut, match="no state"),
    ):
        time_to_failure_by_size(trace)
