"""Compare shares of types under both weights with pandas."""

import pytest
from job_tables import gpu_jobs, kalos, made_up, trace_of

from holdfast.trace.analyses.workloads import workload_shares
from holdfast.trace.errors import LeftOut


@pytest.mark.parametrize("jobs", [kalos, made_up])
def test_shares_of_types(jobs):
    frame = jobs()
    with trace_of(frame) as trace:
        result = workload_shares(trace)
    expected = (
        gpu_jobs(frame)
        .fillna({"type": "unknown"})
        .groupby("type")
        .agg(n=("gpu_num", "size"), s=("gpu_time_s", "sum"))
    )
    assert set(result.table["type"]) == set(expected.index)
    for row in result.table.df().itertuples():
        own = expected.loc[row.type]
        assert (row.jobs, row.gpu_time_h) == (own["n"], pytest.approx(own["s"] / 3600))
        assert row.share_of_jobs == pytest.approx(own["n"] / expected["n"].sum())
        assert row.share_of_gpu_time == pytest.approx(own["s"] / expected["s"].sum())
    assert set(result.chart.panels[0].parts) == {"jobs", "GPU time"}
    key = frame["cluster"].iloc[0].lower().replace(" ", "_")
    assert result.numbers[f"{key}.pretrain.share_of_gpu_time"] == pytest.approx(
        expected.loc["Pretrain", "s"] / expected["s"].sum()
    )


def test_types_are_in_the_studys_order_and_the_unknown_last_and_said():
    frame = made_up()
    unknown = gpu_jobs(frame)["type"].isna().mean()
    with trace_of(frame) as trace:
        result = workload_shares(trace)
    assert result.table["type"].tolist() == ["Pretrain", "Evaluation", "SFT", "Other", "unknown"]
    assert f"the type of {unknown:.1%} of jobs is unknown" in result.caption


def test_it_says_how_types_were_told():
    frame = made_up()
    rule = frame["type"].map({"Pretrain": "guess"}).where(frame["type"].isin(["Pretrain"]), "name")
    frame = frame.assign(type_rule=rule.where(frame["type"].notna(), None))
    shares = gpu_jobs(frame)["type_rule"].value_counts(dropna=True) / len(gpu_jobs(frame))
    with trace_of(frame) as trace:
        result = workload_shares(trace)
    assert f"the job's name ({shares['name']:.1%} of jobs)" in result.caption
    assert f"its size and duration alone ({shares['guess']:.1%} of jobs)" in result.caption
    assert result.numbers["made_up.types_told.guess_share"] == pytest.approx(shares["guess"])
    with trace_of(frame.drop(columns="type_rule")) as trace:
        assert "assigned by" not in workload_shares(trace).caption


def test_without_types_it_is_left_out():
    with trace_of(made_up().drop(columns="type")) as trace, pytest.raises(LeftOut, match="no type"):
        workload_shares(trace)
    with (
        trace_of(made_up().assign(gpu_num=0.0)) as trace,
        pytest.raises(LeftOut, match="no GPU job has a type"),
    ):
        workload_shares(trace)
