"""Check the operator's first screen: key figures, three things to do, losses, the trend."""

import pandas as pd
import pytest
from job_tables import made_up, trace_of
from small_traces import add_hours

from holdfast.trace.analyses import (
    capacity,
    idle,
    losses,
    months,
    queues,
    users,
)
from holdfast.trace.clusters import Cluster
from holdfast.trace.report import overviews
from holdfast.trace.report.overview import _hours
from holdfast.trace.run import characterize

START = pd.Timestamp("2023-06-01")
ANALYSES = [
    analysis
    for module in (capacity, idle, losses, months, queues, users)
    for analysis in module.ANALYSES
]


def job(start_h, end_h, gpus, state="COMPLETED", user="ada", wait_h=0.0, **more):
    times = {
        "submit_at": START + pd.Timedelta(hours=start_h - wait_h),
        "start_at": START + pd.Timedelta(hours=start_h),
        "end_at": START + pd.Timedelta(hours=end_h),
    }
    own = {"cluster": "Seren", "state": state, "gpu_num": gpus, "username": user}
    return own | times | {"reason": None} | more


def screen(*jobs, gpus=64, hours=(), compared=()):
    known = Cluster(name="Seren", source="test", gpu_num=gpus)
    frame = pd.DataFrame(jobs)
    with trace_of(frame, clusters=[known], compared=compared) as trace:
        if hours:
            add_hours(trace, list(hours))
        return overviews(characterize(trace, analyses=ANALYSES))


def figures(one):
    return {
        figure.name: (figure.value.replace("\xa0", " "), figure.note) for figure in one.key_figures
    }


BROKEN = (
    job(0, 10, 32),
    job(0, 10, 8, "FAILED", "bob"),
    job(0, 5, 8, "FAILED", "cyd", reason="AttributeError"),
    job(0, 2, 8, "FAILED", "dan", reason="NVLinkError"),
    job(9, 10, 1, wait_h=2),
)


def test_the_key_figures_of_an_operator():
    (one,) = screen(*BROKEN)
    found = figures(one)
    # 320 + 80 + 40 + 16 + 1 GPU-hours of 640 up to the last submission's hour, the eighth.
    in_use = (32 * 8 + 8 * 8 + 8 * 5 + 8 * 2) / (64 * 8)
    assert found["GPUs in use"] == (f"{in_use:.0%}".replace("%", " %"), "of 64 GPUs, on average")
    assert found["p95 wait"][0] == "96 min 00 s"  # 95% of the way from 0 to 2 hours, of 5 jobs
    assert found["GPU-hours lost"][0] == "136"
    assert found["GPU-hours lost"][1].replace("\xa0", " ") == "30 %, by 3 failed jobs"
    assert found["Idle while allocated"][0] == "unknown"
    assert "--metrics" in found["Idle while allocated"][1]


def test_without_a_failed_job_no_gpu_hour_is_lost_and_without_states_it_is_unknown():
    (one,) = screen(job(0, 10, 32), job(9, 10, 1))
    assert figures(one)["GPU-hours lost"] == ("0", "no failed job held a GPU")
    stateless = [{name: value for name, value in job(0, 10, 32).items() if name != "state"}]
    (one,) = screen(*stateless)
    assert figures(one)["GPU-hours lost"] == ("unknown", "needs the states of jobs")


def test_losses_name_people_and_causes():
    (one,) = screen(*BROKEN)
    assert [tuple(text.replace("\xa0", " ") for text in row) for row in one.losses] == [
        ("bob", "cause not recorded", "1", "80", "59 %"),
        ("cyd", "AttributeError", "1", "40", "29 %"),
        ("dan", "NVLinkError", "1", "16", "12 %"),
    ]


def test_what_costs_most_is_done_first():
    (one,) = screen(*BROKEN)
    assert [action.do for action in one.actions] == [
        "Record why jobs fail.",
        "Help cyd: AttributeError.",
        "Test the nodes.",
    ]
    assert one.actions[0].gpu_h == 80
    assert "1 failure with 80 GPU-hours has no recorded cause" in one.actions[0].why
    assert "Begin with bob" in one.actions[0].why
    assert [action.gpu_h for action in one.actions] == sorted(
        (action.gpu_h for action in one.actions), reverse=True
    )


def test_idle_gpus_lead_where_they_cost_most():
    sums = [
        ("Seren", "GPU_UTIL", str(START + pd.Timedelta(hours=hour)), 100, 0.0, 90)
        for hour in range(8)
    ]
    (one,) = screen(*BROKEN, hours=sums)
    assert one.actions[0].do == "Find out who holds idle GPUs."
    assert figures(one)["Idle while allocated"][0].startswith("at least ")


def test_idle_gpus_that_may_all_be_free_are_not_called_zero():
    sums = [
        ("Seren", "GPU_UTIL", str(START + pd.Timedelta(hours=hour)), 100, 0.0, 1)
        for hour in range(8)
    ]
    (one,) = screen(job(0, 10, 8), hours=sums)
    value, note = figures(one)["Idle while allocated"]
    assert value == "unknown"
    assert "nodes" in note


def test_a_full_cluster_is_not_told_to_fill_itself():
    (one,) = screen(job(0, 10, 64), job(9, 10, 64, wait_h=3), gpus=64)
    said = [action.do for action in one.actions]
    assert "Share the GPUs by quota, or add GPUs." in said
    assert "Fill the free GPUs." not in said
    (free,) = screen(job(0, 10, 4), job(9, 10, 4), gpus=64)
    assert free.actions[0].do == "Fill the free GPUs."


@pytest.mark.parametrize("seed", range(3))
def test_there_are_three_things_to_do_for_any_trace_with_gpu_jobs(seed):
    with trace_of(made_up(seed, rows=200)) as trace:
        (one,) = overviews(characterize(trace, analyses=ANALYSES))
    assert len(one.actions) == 3
    assert len({action.do for action in one.actions}) == 3
    assert all(action.why.endswith(".") for action in one.actions)


def test_without_a_gpu_job_there_is_nothing_to_do():
    (one,) = screen(job(0, 1, 0))
    assert one.actions == []
    assert figures(one)["GPUs in use"][0] == "unknown"


def test_a_compared_cluster_has_no_screen():
    other = made_up(rows=50)
    known = Cluster(name="Seren", source="test", gpu_num=64)
    with trace_of(pd.DataFrame([*BROKEN]), other, clusters=[known], compared=["Made up"]) as trace:
        assert [one.cluster for one in overviews(characterize(trace, analyses=ANALYSES))] == [
            "Seren"
        ]


@pytest.mark.parametrize(
    ("hours", "said"),
    [(0, "0"), (1, "1"), (12345.6, "12,300"), (4.5678, "4.57"), (0.01234, "0.0123"), (100.4, "100"), (12.0, "12")],
)  # fmt: skip
def test_hours_have_three_figures(hours, said):
    assert _hours(hours) == said
