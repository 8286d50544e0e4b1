"""The synthetic 123B job and evaluation have the shapes of the study's figures 10 to 13."""

import statistics
from itertools import pairwise

import pytest

from holdfast.profile.formulas.pipeline import bubble_over_ideal
from holdfast.profile.job import NAME, Job
from holdfast.profile.recording import Recording
from holdfast.profile.report.summary import summarize
from holdfast.profile.report.view import mean_activity
from holdfast.profile.schedule import one_f_one_b
from holdfast.profile.synthetic import (
    MODEL_123B,
    THREE_D,
    write_evaluation,
    write_hierarchical_zero,
    write_three_d,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The summaries of both layouts and of the evaluation."""
    folder = tmp_path_factory.mktemp("synthetic")
    jobs = {
        "3d": write_three_d(folder / "3d", steps=2),
        "zero": write_hierarchical_zero(folder / "zero", steps=2),
        "evaluation": write_evaluation(folder / "evaluation"),
    }
    return {
        name: summarize(Recording.read(folder / name), name=name, job=job)
        for name, job in jobs.items()
    }


def test_the_model_has_123b_parameters_and_the_job_2048_gpus():
    assert MODEL_123B.parameters == pytest.approx(123e9, rel=0.01)
    assert THREE_D.gpus == 2048


def test_1f1b_takes_the_ideal_time_and_the_bubble():
    passes = one_f_one_b(4, 8, forward_s=1.0, backward_s=2.0)
    assert max(one.end_s for one in passes) == 8 * 3 * (1 + bubble_over_ideal(4, 8))
    assert len(passes) == 2 * 4 * 8
    for stage in range(4):
        own = sorted((one for one in passes if one.stage == stage), key=lambda one: one.start_s)
        assert all(two.start_s >= one.end_s for one, two in pairwise(own))
        held, most = 0, 0
        for one in own:
            held += 1 if one.kind == "forward" else -1
            most = max(most, held)
        assert most == 4 - stage, "as many in flight as the formula gives"


def test_no_pass_begins_before_its_input_is_there():
    passes = one_f_one_b(3, 5, forward_s=1.0, backward_s=1.7, send_s=0.1)
    ends = {(one.kind, one.stage, one.microbatch): one.end_s for one in passes}
    for one in passes:
        stage = one.stage - 1 if one.kind == "forward" else one.stage + 1
        if (before := ends.get((one.kind, stage, one.microbatch))) is not None:
            assert one.start_s >= before + 0.1 - 1e-9
        if one.kind == "backward":
            assert one.start_s >= ends["forward", one.stage, one.microbatch]


def test_3d_parallelism_has_valleys_of_the_bubble_and_of_communication(runs):
    found = runs["3d"].valleys.seconds_by_cause()
    assert set(found) == {"pipeline_bubble", "communication"}
    # The bubble and the exchange of gradients come once a step on each of the four stages.
    for cause in found:
        places = {
            (one.rank, one.start_ns) for one in runs["3d"].valleys.found if one.cause == cause
        }
        assert {rank for rank, _ in places} == {0, 512, 1024, 1536}


def test_hierarchical_zero_is_faster_busier_and_has_fewer_valleys(runs):
    three_d, zero = runs["3d"], runs["zero"]
    assert zero.speed.tokens_per_s / three_d.speed.tokens_per_s == pytest.approx(1.16, abs=0.01)
    assert mean_activity(zero) > mean_activity(three_d) + 10
    assert zero.idle_share < three_d.idle_share / 3
    assert len(zero.valleys.found) < len(three_d.valleys.found) / 2
    assert set(zero.valleys.seconds_by_cause()) == {"communication"}
    # Recompute costs FLOPs that MFU does not count.
    assert zero.utilization.hfu_causal / zero.utilization.mfu_causal == pytest.approx(4 / 3)


def test_memory_falls_with_the_pipeline_rank_and_is_level_under_zero(runs):
    peaks = [one.peak_bytes for one in runs["3d"].memory]
    assert [one.stage for one in runs["3d"].memory] == [0, 1, 2, 3]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] / peaks[-1] > 1.4
    activations = [one.theory.activations for one in runs["3d"].memory]
    assert [one / activations[-1] for one in activations] == pytest.approx([4, 3, 2, 1])
    assert len({one.peak_bytes for one in runs["zero"].memory}) == 1
    for run in ("3d", "zero"):
        assert all(abs(one.residual_bytes) < 1 for one in runs[run].memory)


def test_memory_under_3d_parallelism_rises_and_falls_within_a_step(runs):
    first = [one.allocated_bytes for one in runs["3d"].recording.memory if one.rank == 0]
    fixed = min(first)
    theory = runs["3d"].memory[0].theory
    assert fixed == pytest.approx(theory.weights + theory.gradients + theory.optimizer, abs=1)
    assert statistics.median(first) > fixed + 0.7 * theory.activations


def test_the_evaluation_idles_while_it_loads_and_while_it_scores(runs):
    run = runs["evaluation"]
    phases = {one.name: one for one in run.phases}
    assert phases["load"].share + phases["preprocess"].share == pytest.approx(0.295, abs=1e-3)
    assert phases["metric"].share == pytest.approx(0.190, abs=1e-3)
    assert phases["metric"].seconds == pytest.approx(42)
    assert phases["prefill"].share + phases["decode"].share == pytest.approx(0.515, abs=2e-3)
    for name in ("load", "preprocess", "metric"):
        assert phases[name].idle_share > 0.98
    assert phases["prefill"].idle_share == 0
    assert phases["decode"].idle_share < 0.01
    assert set(run.valleys.seconds_by_cause()) == {"load", "metric"}
    assert run.evaluation
    assert run.speed is None
    assert not any("tokens" in reason for reason in run.missing)


def test_a_job_that_is_written_is_read_back(tmp_path):
    job = write_hierarchical_zero(tmp_path, steps=1)
    assert Job.read(tmp_path / NAME) == job
