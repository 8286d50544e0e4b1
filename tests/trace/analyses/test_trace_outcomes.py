"""Compare final states under both weights with pandas."""

import pytest
from job_tables import gpu_jobs, made_up, openb, rows_of, trace_of

from holdfast.trace.analyses.outcomes import (
    final_states,
    final_states_by_size,
    final_states_by_type,
)
from holdfast.trace.errors import LeftOut

OUTCOME = {
    "COMPLETED": "completed", "CANCELLED": "cancelled", "FAILED": "failed", "TIMEOUT": "failed",
    "NODE_FAIL": "failed", "OUT_OF_MEMORY": "failed", "PREEMPTED": "preempted",
}  # fmt: skip


def ended(frame):
    own = gpu_jobs(frame)
    return own.assign(outcome=own["state"].map(OUTCOME)).dropna(subset="outcome")


def assert_shares(rows, own):
    assert rows["outcome"].tolist() == ["completed", "cancelled", "failed", "preempted"]
    for row in rows.itertuples():
        mine = own[own["outcome"] == row.outcome]
        assert row.jobs == len(mine)
        assert row.share_of_jobs == pytest.approx(len(mine) / len(own))
        assert row.share_of_gpu_time == pytest.approx(
            mine["gpu_time_s"].sum() / own["gpu_time_s"].sum()
        )


@pytest.mark.parametrize("jobs", [openb, made_up])
def test_final_states_of_those_that_ended(jobs):
    frame = jobs()
    own = ended(frame)
    with trace_of(frame) as trace:
        result = final_states(trace)
    assert_shares(rows_of(result.table), own)
    left_out = len(gpu_jobs(frame)) - len(own)
    assert left_out > 0
    assert f"({left_out:,} unfinished left out)" in result.caption
    by_jobs, by_time = result.chart.panels
    assert sum(values[0] for values in by_jobs.parts.values()) == pytest.approx(1)
    assert sum(values[0] for values in by_time.parts.values()) == pytest.approx(1)
    assert ("preempted" in by_jobs.parts) == ("PREEMPTED" in set(frame["state"]))


def test_by_type_and_by_number_of_gpus():
    frame = made_up()
    own = ended(frame).fillna({"type": "unknown"})
    with trace_of(frame) as trace:
        by_type, by_size = final_states_by_type(trace), final_states_by_size(trace)
    for kind, mine in own.groupby("type"):
        assert_shares(rows_of(by_type.table, part=kind), mine)
    assert set(by_type.table["part"]) == set(own["type"])
    assert_shares(rows_of(by_size.table, part="<1"), own[own["gpu_num"] < 1])
    assert_shares(rows_of(by_size.table, part="5–8"), own[own["gpu_num"] == 8])  # noqa: RUF001
    failed = own[own["outcome"] == "failed"]
    assert by_size.numbers["made_up.gpus_5_8.failed_share_of_jobs"] == pytest.approx(
        (failed["gpu_num"] == 8).sum() / (own["gpu_num"] == 8).sum()
    )
    rate = (failed.groupby("type").size() / own.groupby("type").size()).drop("unknown")
    lost = failed.groupby("type")["gpu_time_s"].sum().drop("unknown")
    assert f"{rate.idxmax()} fails most often ({rate.max():.1%}" in by_type.caption
    assert f"{lost.idxmax()} loses most" in by_type.caption


def test_without_final_states_it_is_left_out():
    for frame in (made_up().drop(columns="state"), made_up().assign(state="RUNNING")):
        with trace_of(frame) as trace:
            for analysis in (final_states, final_states_by_type, final_states_by_size):
                with pytest.raises(LeftOut, match=r"^Left out: .+\.$"):
                    analysis(trace)
