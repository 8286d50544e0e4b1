"""The summary of recordings that the test makes."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.profile.formulas.shape import Layout, Model
from holdfast.profile.job import Gpu, Job
from holdfast.profile.recording import MemoryUse, Recording, Series, Span
from holdfast.profile.report.summary import joules_between, stage_of, steps_of, summarize
from holdfast.profile.report.view import comparison, headline, sentences

SECOND = 1_000_000_000
MODEL = Model(layers=2, hidden=64, heads=4, vocabulary=100)
JOB = Job(model=MODEL, layout=Layout(sequence=128, data=2), gpu=Gpu(peak_tflops=1.0))


def series(metric, values, *, device=0, source="gpm", unit="%", node="a"):
    return Series(
        metric=metric, unit=unit, source=source, node=node, device=device, rank=None, interval_s=1.0,
        times_ns=[at * SECOND for at in range(1, len(values) + 1)], values=values,
    )  # fmt: skip


def span(phase, start, end, *, rank=0, step=1):
    return Span(
        phase=phase,
        start_ns=round(start * SECOND),
        end_ns=round(end * SECOND),
        step=step,
        rank=rank,
        node="a",
    )


def steps(count, *, rank=0, seconds=2.0, first=1):
    spans = []
    for number in range(count):
        at = number * seconds
        spans += [
            span("data", at, at + 0.1 * seconds, rank=rank, step=first + number),
            span("forward", at + 0.1 * seconds, at + seconds, rank=rank, step=first + number),
        ]
    return spans


def recording(*, spans=(), **parts):
    return Recording(spans=tuple(spans), **parts)


def test_speed_is_tokens_a_step_over_the_median_step():
    spans = [*steps(3), span("forward", 6, 16, step=4), span("forward", 16, 17, step=5)]
    speed = summarize(recording(spans=spans), name="r", job=JOB).speed
    assert (speed.steps, speed.median_step_s, speed.tokens_a_step) == (5, 2.0, 256)
    assert speed.tokens_per_s == 128
    assert summarize(recording(spans=spans), name="r").speed.tokens_per_s is None


def test_a_step_that_ran_again_after_a_restart_is_two_steps():
    spans = [
        *steps(3),
        *[span("forward", at, at + 1, step=step) for at, step in ((100, 2), (101, 3), (102, 4))],
    ]
    found = steps_of(spans)
    assert [one.number for one in found] == [1, 2, 3, 2, 3, 4]
    assert summarize(recording(spans=spans), name="r").speed.median_step_s == 1.5


def test_the_rank_with_most_steps_is_the_reference():
    assert len(steps_of([*steps(1), *steps(4, rank=1)])) == 4
    assert steps_of([span("load", 0, 1, step=None)]) == []
    assert len(steps_of([span("step", 0, 1), span("step", 1, 2, step=2)])) == 2


def test_mfu_by_hand_and_beside_it_the_peak_and_its_source():
    use = summarize(recording(spans=steps(3)), name="r", job=JOB).utilization
    layer = 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64
    parameters = 2 * layer + 100 * 64 + 64
    attention = 12 * 2 * 64 * 128
    assert use.tokens_per_s_per_gpu == 64
    assert use.mfu_full == pytest.approx((6 * parameters + attention) * 64 / 1e12)
    assert use.mfu_causal == pytest.approx((6 * parameters + attention / 2) * 64 / 1e12)
    assert use.hfu_full == pytest.approx((6 * parameters + attention * 4 / 3) * 64 / 1e12)
    assert use.peak.source == "stated by the user"
    stated = summarize(recording(spans=steps(3)), name="r", job=JOB, peak_tflops=2.0).utilization
    assert stated.mfu_full == pytest.approx(use.mfu_full / 2)
    with pytest.raises(BadUse, match="above 0"):
        summarize(recording(spans=steps(3)), name="r", job=JOB, peak_tflops=-1.0)


def test_no_mfu_is_given_for_a_gpu_without_a_known_peak():
    job = Job(model=MODEL, layout=JOB.layout, gpu=Gpu(name="Tesla V100"))
    summary = summarize(recording(spans=steps(2)), name="r", job=job)
    assert summary.utilization is None
    assert any("Tesla V100 is not in the table of peaks" in one for one in summary.missing)
    assert summary.speed.tokens_per_s == 128


def test_phases_count_without_those_inside_and_add_up_to_the_recorded_time():
    spans = [span("backward", 0, 6), span("communication", 2, 5), span("optimizer", 8, 10)]
    summary = summarize(recording(spans=spans), name="r")
    found = {one.name: one.seconds for one in summary.phases}
    assert found == {"backward": 3, "communication": 3, "optimizer": 2, "between phases": 2}
    assert sum(one.share for one in summary.phases) == pytest.approx(1)
    assert {one.idle_share for one in summary.phases} == {None}


def test_the_idle_share_of_a_phase_counts_single_samples_too():
    values = [80, 0, 80, 80, 0, 0, 80, 80]
    spans = [span("forward", 0, 4), span("metric", 4, 6), span("forward", 6, 8)]
    summary = summarize(recording(spans=spans, series=(series("gpu_sm_active", values),)), name="r")
    found = {one.name: one.idle_share for one in summary.phases}
    assert found == {"forward": pytest.approx(1 / 6), "metric": 1.0}
    assert summary.idle_share == pytest.approx(2 / 8), "a valley has two samples or more"


def test_memory_stands_beside_the_theory_of_its_stage_with_the_residual():
    layout = Layout(sequence=128, data=2, tensor=2, pipeline=2, microbatches=4)
    job = Job(model=MODEL, layout=layout, gpu=Gpu())
    assert [stage_of(rank, job) for rank in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, None]
    memory = [
        MemoryUse(at_ns=at * SECOND, step=1, rank=rank, node="a", allocated_bytes=5, reserved_bytes=9_000_000,
                  peak_bytes=peak)
        for at, rank, peak in ((1, 0, 100), (2, 0, 3_000_000), (1, 4, 1_000), (1, 9, 7))
    ]  # fmt: skip
    summary = summarize(recording(memory=tuple(memory)), name="r", job=job)
    first, last, beyond = summary.memory
    assert (first.stage, first.peak_bytes) == (0, 3_000_000)
    assert first.residual_bytes == pytest.approx(3_000_000 - first.theory.total)
    assert last.residual_bytes < 0
    assert (beyond.stage, beyond.theory, beyond.residual_bytes) == (None, None, None)


def test_energy_a_step_is_from_the_counter_or_else_from_power():
    counter = series("gpu_energy", [100, 150, 250, 350, 360], unit="J")
    power = series("gpu_power", [50, 50, 100, 100, 10], unit="W")
    spans = [span("forward", 1, 2), span("forward", 2, 4, step=2)]
    summary = summarize(recording(spans=spans, series=(counter, power)), name="r")
    assert (summary.energy.joules, summary.energy.joules_a_step) == (260, 125)
    assert "counter" in summary.energy.source
    summary = summarize(recording(spans=spans, series=(power,)), name="r")
    assert (summary.energy.joules, summary.energy.joules_a_step) == (260, 125)
    assert "power" in summary.energy.source


def test_a_counter_that_began_anew_loses_one_interval_and_no_more():
    assert joules_between(series("gpu_energy", [100, 200, 5, 25], unit="J")) == 120
    half = round(1.5 * SECOND)
    assert joules_between(series("gpu_energy", [100, 200], unit="J"), half, None) == 50


def test_an_empty_recording_says_all_that_is_missing():
    summary = summarize(recording(unavailable={"a": {"nvml": "no driver"}}), name="r")
    said = " ".join(summary.missing)
    for part in ("No counter of a GPU", "nvml: no driver", "No rank recorded phases", "No step", "--job", "no energy",
                 "allocator"):  # fmt: skip
        assert part in said
    assert headline(summary) == "0\N{NO-BREAK SPACE}ms recorded, nothing measured"
    assert list(sentences(summary))[-1].startswith("Missing: ")


def test_without_sm_activity_the_metric_in_its_place_is_named():
    summary = summarize(recording(series=(series("gpu_utilization", [90, 0, 0, 90]),)), name="r")
    assert any("a kernel ran" in one for one in summary.missing)
    assert "GPU idle for 50.0" in headline(summary)
    host = summarize(
        recording(series=(series("cpu_utilization", [90, 0, 0, 90], device=None),)), name="r"
    )
    assert "CPU idle for 50.0" in headline(host)


def test_phases_that_a_slow_disk_left_out_are_counted():
    summary = summarize(recording(spans=steps(2), dropped_spans=3), name="r")
    assert any(one.startswith("3 phases left out") for one in summary.missing)


def test_parts_that_were_too_many_to_read_are_named():
    summary = summarize(recording(spans=steps(2), left_out_bytes=7_500_000), name="r")
    assert any("left out, 7.5 MB" in one for one in summary.missing)
    assert not any(
        "left out" in one for one in summarize(recording(spans=steps(2)), name="r").missing
    )


def test_two_runs_side_by_side_show_the_change_and_each_cause():
    slow = summarize(
        recording(spans=steps(3), series=(series("gpu_sm_active", [80, 0, 0, 80, 80, 80]),)),
        name="slow",
        job=JOB,
    )
    fast = summarize(
        recording(spans=steps(3, seconds=1.0), series=(series("gpu_sm_active", [80] * 6),)),
        name="fast",
        job=JOB,
    )
    rows = {row.name: (row.one, row.other, row.change) for row in comparison(slow, fast)}
    assert rows["tokens/s"] == ("128", "256", "+100.0 %")
    assert rows["median step"][2] == "-50.0 %"
    assert [part.replace("\N{NO-BREAK SPACE}", " ") for part in rows["idle: forward"]] == [
        "33.3 %",
        "0.0 %",
        "",
    ]
    assert "energy a step" not in rows


def test_steps_come_from_the_log_or_from_the_utilisation_where_no_phase_is_recorded():
    logged = summarize(
        recording(spans=[span("step", at, at + 2, step=at) for at in (2, 4, 6)]), name="r"
    )
    assert (logged.speed.source, logged.speed.median_step_s) == ("log", 2.0)
    waves = ([90.0] * 70 + [0.0] * 40) * 3
    found = summarize(recording(series=(series("gpu_utilization", waves),)), name="r").speed
    assert (found.source, found.steps, found.median_step_s) == ("gpu_utilization", 3, 110.0)
