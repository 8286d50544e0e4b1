"""Compare failures by cause with the published Table 3 for matching jobs, and with exact answers on
a few rows.
"""

import csv
import math
import statistics

import pytest
from job_tables import made_up
from job_tables import trace_of as frames_of
from small_traces import SHARED_DATA, trace_of

from holdfast.trace.analyses.failures import failure_table, failures_by_month, lost_gpu_time
from holdfast.trace.errors import LeftOut

TABLE3 = SHARED_DATA / "acme_failure_table/table3.csv"


def published():
    if not TABLE3.exists():
        pytest.skip("the study's Table 3 is not at hand")
    with TABLE3.open() as file:
        return [
            {
                "category": row["category"],
                "reason": row["reason"],
                "number": int(row["num"]),
                "gpus": float(row["gpu_demand_avg"].rstrip("?")),
                "minutes": float(row["tf_min_avg"].rstrip("?")),
                "share": float(row["gpu_time_total_pct"]),
            }
            for row in csv.DictReader(file)
        ]


def jobs_with(row, gpu_minutes):
    """Make jobs of a reason with its mean GPUs and minutes, whose products add up to `gpu_minutes`.

    GPUs and time to failure are correlated in the study. So one job gets the share `lead` of all
    GPUs and of all time, above or below its equal part; the others get equal parts of the rest.
    """
    n, gpus, minutes = row["number"], row["gpus"], row["minutes"]
    # Solve n^2 g t (a^2 + (1 - a)^2 / (n - 1)) = gpu_minutes for a. If too few GPU-minutes are
    # wanted, that job gets GPUs and no time.
    wanted = gpu_minutes / (n * n * gpus * minutes)
    square, root = 1 + 1 / (n - 1), wanted * n - 1
    if wanted >= 1 / n:
        lead = (1 / (n - 1) + math.sqrt(root / (n - 1))) / square
        leads = (lead, lead)
    else:
        leads = (1 - wanted * (n - 1), 0.0)  # n^2 g t (1 - a) / (n - 1) = gpu_minutes
    shares = [leads] + [((1 - leads[0]) / (n - 1), (1 - leads[1]) / (n - 1))] * (n - 1)
    return [(n * gpus * of_gpus, n * minutes * of_time) for of_gpus, of_time in shares]


def failed(number, reason, gpus, minutes, **more):
    return {
        "cluster": "Acme", "job_id": str(number), "state": "FAILED", "reason": reason, "gpu_num": gpus,
        "run_s": 60 * minutes, **more,
    }  # fmt: skip


def test_table_3_comes_back_from_jobs_made_to_it(tmp_path):
    rows = published()
    total = 1.3e8  # GPU-minutes of all failures: any number in which each reason can have its share
    jobs = []
    for row in rows:
        wanted = (
            total * row["share"] / 100
            if row["share"] >= 0.05
            else row["number"] * row["gpus"] * row["minutes"]
        )
        jobs += [(row["reason"], *held) for held in jobs_with(row, wanted)]
    with trace_of(tmp_path, [failed(number, *job) for number, job in enumerate(jobs)]) as trace:
        result = failure_table(trace)
    got = {
        line[2]: dict(zip(result.table.columns, line, strict=True)) for line in result.table.rows()
    }
    assert len(got) == 29
    for row in rows:
        line = got[row["reason"]]
        assert line["category"] == row["category"]
        assert line["number"] == row["number"]
        assert line["mean_gpus"] == pytest.approx(row["gpus"], rel=1e-9)
        assert line["mean_minutes_to_failure"] == pytest.approx(
            row["minutes"], abs=1e-4
        )  # rounded to the millisecond
        assert 100 * line["share_of_failure_gpu_time"] == pytest.approx(row["share"], abs=0.05)
    assert result.numbers["acme.failures.infrastructure.number"] == 281
    assert result.numbers["acme.failures.framework.number"] == 404
    assert result.numbers["acme.failures.script.number"] == 1890
    assert result.numbers["acme.failures.infrastructure.share_of_failures"] == pytest.approx(
        0.11, abs=0.005
    )
    for category, share in (("infrastructure", 82.06), ("framework", 14.71), ("script", 3.22)):
        assert 100 * result.numbers[f"acme.failures.{category}.share_of_gpu_time"] == pytest.approx(
            share, abs=0.1
        )
    assert result.table["reason"][0] == "NVLinkError"  # the first of its category, as in the study


def test_medians_shares_and_restarts_are_exact(tmp_path):
    def of(number, reason, gpus, username, submit, start, end, **more):
        hours = [int(clock[:2]) + int(clock[3:]) / 60 for clock in (start, end)]
        times = {"submit_at": submit, "start_at": start, "end_at": end}
        times = {name: f"2023-05-01 {clock}" for name, clock in times.items()}
        return failed(
            number, reason, gpus, 60 * (hours[1] - hours[0]), username=username, **(times | more)
        )

    jobs = [
        # Fails at 10:00 and is submitted again; a job of another size in between is other work.
        of(1, None, 8, "a", "09:00", "09:50", "10:00"),
        of(2, None, 16, "a", "10:01", "10:01", "10:02"),
        of(3, None, 8, "a", "10:03", "10:05", "10:35", state="COMPLETED"),
        # Waited since before the failure, so it is no restart, although the first to start after
        # the failure.
        of(8, None, 8, "a", "09:30", "10:02", "10:03", state="COMPLETED"),
        # The same size, but another user.
        of(4, None, 8, "b", "10:03", "10:05", "10:35", state="COMPLETED"),
        of(5, "ECCError", 8, "b", "09:00", "09:30", "10:30"),
        of(6, "ECCError", 4, "c", "09:00", "09:30", "09:50", attempt=0),
        of(6, "ECCError", 4, "c", "09:00", "09:53", "10:33", attempt=1),
        {**failed(7, "ECCError", 0, 40, username="c"), "job_id": "cpu"},
    ]
    with trace_of(tmp_path, jobs) as trace:
        table = failure_table(trace).table
        with_cpu = failure_table(trace, cpu_jobs=True).table
        soon = failure_table(trace, restart_within_h=1 / 60).table
    ecc, unknown = (dict(zip(table.columns, row, strict=True)) for row in table.rows())
    assert (ecc["reason"], unknown["reason"]) == ("ECCError", "unknown")
    assert (ecc["number"], unknown["number"]) == (3, 2)
    assert ecc["median_gpus"] == statistics.median([8, 4, 4])
    assert ecc["mean_gpus"] == pytest.approx(16 / 3)
    assert ecc["median_minutes_to_failure"] == 40
    assert ecc["gpu_time_h"] == pytest.approx((8 * 60 + 4 * 20 + 4 * 40) / 60)
    assert ecc["share_of_failure_gpu_time"] == pytest.approx(720 / (720 + 80 + 16))
    # Job 6 continues as its own next attempt after 3 min; its last attempt and job 5 do not.
    assert (ecc["restarts"], ecc["mean_minutes_to_restart"]) == (1, 3)
    # Job 1 ended at 10:00 and starts again at 10:05; no other job has job 2's size.
    assert (unknown["restarts"], unknown["median_minutes_to_restart"]) == (1, 5)
    assert with_cpu["number"].tolist() == [4, 2]
    assert soon["restarts"].tolist() == [0, 0]


def test_clusters_are_pooled_as_the_study_does_but_not_with_those_compared(tmp_path):
    jobs = [
        failed(1, "ECCError", 1, 60),
        {**failed(2, None, 1, 60), "cluster": "Other", "state": "NODE_FAIL"},
    ]
    jobs.append({**failed(3, None, 1, 60), "cluster": "Philly"})
    with trace_of(tmp_path, jobs, compared=frozenset({"Philly"})) as trace:
        result = failure_table(trace)
    assert result.table["cluster"].tolist() == ["Acme", "Other", "Philly", "all", "all"]
    assert result.table.where(cluster="all")["reason"].tolist() == ["ECCError", "NodeFailure"]
    assert "Philly: 1 failure took" in result.caption
    assert "All clusters: 2 failures" in result.caption


def test_shares_are_also_of_the_failures_with_a_cause_of_the_studys_kinds(tmp_path):
    jobs = [
        failed(1, "ECCError", 8, 60),
        failed(2, "KeyError", 1, 60),
        failed(3, "KeyError", 1, 120),
    ]
    jobs += [
        failed(4, None, 100, 60),
        {**failed(5, None, 1, 60), "state": "TIMEOUT"},
        failed(6, "odd", 1, 60),
    ]
    with trace_of(tmp_path, jobs) as trace:
        result = failure_table(trace)
    stem = "acme.failures.recorded"
    assert result.numbers[f"{stem}.number"] == 3
    assert result.numbers[f"{stem}.share_of_failures"] == 0.5
    assert result.numbers[f"{stem}.infrastructure.number"] == 1
    assert result.numbers[f"{stem}.infrastructure.share_of_failures"] == pytest.approx(1 / 3)
    assert result.numbers[f"{stem}.infrastructure.share_of_gpu_time"] == pytest.approx(8 / 11)
    assert result.numbers[f"{stem}.script.share_of_gpu_time"] == pytest.approx(3 / 11)
    assert result.numbers[f"{stem}.framework.number"] == 0
    # The caption has the share of unrecorded causes.
    assert "unknown 16.7% of them and 88.5% of that time" in result.caption
    assert (
        "3 have a cause in one of the study's categories, infrastructure 33.3% of these"
        in result.caption
    )
    assert "framework" not in result.caption


def test_lost_gpu_time_counts_what_did_not_complete(tmp_path):
    states = {
        "COMPLETED": (2, 10),
        "CANCELLED": (1, 60),
        "FAILED": (3, 6),
        "NODE_FAIL": (1, 2),
        "RUNNING": (1, 2),
    }
    jobs = [
        {
            "cluster": "X",
            "job_id": f"{state}{n}",
            "state": state,
            "type": "Pretrain",
            "gpu_num": 1,
            "run_s": 3600 * hours,
        }
        for state, (number, hours) in states.items()
        for n in range(number)
    ]
    jobs.append(
        {
            "cluster": "X",
            "job_id": "cpu",
            "state": "FAILED",
            "type": "Pretrain",
            "gpu_num": 0,
            "run_s": 1e6,
        }
    )
    with trace_of(tmp_path, jobs) as trace:
        by_state, by_category = lost_gpu_time(trace), lost_gpu_time(trace, by="category")
        by_type = lost_gpu_time(trace, by="type")
    total_h = 20 + 60 + 18 + 2 + 2
    assert by_state.numbers["x.lost.share_of_gpu_time"] == pytest.approx(80 / total_h)
    assert by_state.numbers["x.lost.cancelled.share_of_gpu_time"] == pytest.approx(60 / total_h)
    assert by_state.numbers["x.lost.cancelled.share_of_jobs"] == pytest.approx(1 / 8)
    assert by_category.numbers["x.lost.infrastructure.share_of_gpu_time"] == pytest.approx(
        2 / total_h
    )
    assert by_category.numbers["x.lost.unknown.share_of_gpu_time"] == pytest.approx(18 / total_h)
    assert by_type.numbers["x.lost.pretrain.share_of_gpu_time"] == pytest.approx(80 / total_h)
    assert "most of it to CANCELLED (75.0%)" in by_state.caption


def test_failures_by_month_leave_no_month_out(tmp_path):
    ends = [
        ("2023-03-31 23:59:59", "ECCError"),
        ("2023-05-01 00:00:00", "ECCError"),
        ("2023-05-09", "KeyError"),
    ]
    with trace_of(
        tmp_path, [failed(n, reason, 1, 1, end_at=end) for n, (end, reason) in enumerate(ends)]
    ) as trace:
        result = failures_by_month(trace)
    rows = {(month, reason): number for _, month, _, reason, number in result.table.rows()}
    assert rows == {
        ("2023-03", "ECCError"): 1, ("2023-04", "ECCError"): 0, ("2023-05", "ECCError"): 1,
        ("2023-03", "KeyError"): 0, ("2023-04", "KeyError"): 0, ("2023-05", "KeyError"): 1,
    }  # fmt: skip
    assert result.numbers["acme.failures.2023-05.infrastructure.number"] == 1
    assert "3 failures in 3 months, most (2) in 2023-05" in result.caption


def test_left_out_where_nothing_is_known(tmp_path):
    with trace_of(tmp_path, [{"cluster": "X", "job_id": "1", "gpu_num": 1, "run_s": 1.0}]) as trace:
        with pytest.raises(LeftOut, match="no state"):
            failure_table(trace)
        with pytest.raises(LeftOut, match="no state"):
            lost_gpu_time(trace)
    with trace_of(tmp_path / "b", [{**failed(1, None, 1, 1), "state": "COMPLETED"}]) as trace:
        with pytest.raises(LeftOut, match="no job of this trace failed"):
            failure_table(trace)
        with pytest.raises(LeftOut, match="every GPU job"):
            lost_gpu_time(trace)
        with pytest.raises(LeftOut, match="no end_at"):
            failures_by_month(trace)


def test_a_cluster_without_states_has_no_bar():
    silent = made_up(cluster="Silent").drop(columns="state")
    with frames_of(made_up(cluster="Known"), silent, compared={"Silent"}) as trace:
        for by in ("state", "type"):
            result = lost_gpu_time(trace, by=by)
            assert list(result.chart.panels[0].parts) == ["Known"]
            assert "Silent" not in result.caption
