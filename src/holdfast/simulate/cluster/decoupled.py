"""Replace the evaluation jobs of each checkpoint by one job of the evaluation coordinator.

A checkpoint's evaluation is a batch of evaluation jobs, called trials here. Batches are found by
the rule of `simulate.arrivals`, applied to the jobs of each user separately. The coordinator of a
batch holds one node: the coordinator loads the model once, deals the samples of all trials to the
node's GPUs, and computes the metrics on CPUs after the GPUs are free. The coordinator needs more
time than the inference time divided by the number of GPUs, since the load is never balanced
perfectly. `simulate.evaluate`, with the live policy, computes the ratio of the two times for a
random sample of batches; the mean ratio is used for all batches.
"""

import random
import statistics
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from holdfast.evaluate.policy import Curve
from holdfast.simulate.arrivals import GAP_S, MIN_JOBS
from holdfast.simulate.cluster.jobs import EVALUATION, Floats, Ints, Jobs, places
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

LOAD_PART: Final = 0.295
"""The share of a trial's run time for loading the model and preparing the data.

Source: Hu et al., NSDI 2024, figure 13 (7B, HumanEval).
"""
METRIC_PART: Final = 0.190
"""The share of a trial's run time for metrics, while the GPU is idle. Same source."""
SIMULATED: Final = 12
"""The number of batches that are drawn at random and simulated."""
_SAMPLES: Final = 8
"""The number of parts into which the coordinator can split a trial: a cautious choice, since
benchmarks have more samples than this.
"""
_TOKEN_S: Final = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """Batches of trials, one batch per checkpoint. Shapes: N jobs, B batches."""

    of_job: Ints
    """(N) The index of each job's batch; -1 for a job in no batch."""
    first_s: Floats
    """(B) The time of the first submission, in seconds."""
    last_s: Floats
    """(B) The time of the last submission, in seconds."""

    def __len__(self) -> int:
        return len(self.first_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoupled:
    """The jobs after coordinators have replaced the trials. Shapes: N' jobs, B batches."""

    jobs: Jobs
    batch: Ints
    """(N') The index of the batch whose coordinator the job is; -1 if the job is no coordinator."""
    scores_s: Floats
    """(B) The time from the coordinator's start to the last score, in seconds."""
    held_ratio: float
    """The time that GPUs are held after the model is loaded, relative to the ideal: the inference
    time divided by the number of GPUs.
    """
    scores_ratio: float
    """The time from the end of the load to the last score, relative to the same ideal."""
    simulated: int
    """The number of simulated batches over which the two ratios are averaged."""


def batches_of(jobs: Jobs, *, gpus_per_node: int) -> Batches:
    """Find the batches of trials, one batch per evaluation of a checkpoint.

    A batch consists of evaluation jobs of one user, each submitted less than `GAP_S` after the
    previous one. Jobs on more than one node, and batches of fewer than `MIN_JOBS` jobs, do not
    count.
    """
    of_job = np.full(len(jobs), -1, dtype=np.int64)
    evaluation = places(jobs.types, EVALUATION)
    those = np.flatnonzero((jobs.type == evaluation) & (jobs.gpus <= gpus_per_node))
    if evaluation is None or not len(those):
        return Batches(of_job=of_job, first_s=np.zeros(0), last_s=np.zeros(0))
    those = those[np.argsort(jobs.user[those], kind="stable")]  # stable: keeps order of time
    new = np.concatenate(
        [
            [True],
            (np.diff(jobs.user[those]) != 0) | (np.diff(jobs.submit_s[those]) >= GAP_S),
        ]
    )
    run = np.cumsum(new) - 1
    large = np.bincount(run) >= MIN_JOBS
    number = np.where(large, np.cumsum(large) - 1, -1)
    of_job[those] = number[run]
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(those)) - 1
    return Batches(
        of_job=of_job,
        first_s=jobs.submit_s[those[starts[large]]],
        last_s=jobs.submit_s[those[ends[large]]],
    )


def decouple(jobs: Jobs, batches: Batches, *, gpus_per_node: int, seed: int) -> Decoupled:
    """Replace each batch by a coordinator, which is submitted with the last trial of the batch.

    Args:
        jobs: the jobs, trials included.
        batches: the batches of these jobs.
        gpus_per_node: the number of GPUs of each coordinator.
        seed: the seed for drawing the simulated batches.
    """
    trials = np.flatnonzero(batches.of_job >= 0)
    batch = batches.of_job[trials]
    work_s = jobs.run_s[trials] * jobs.gpus[trials]
    inference_s = (1 - LOAD_PART - METRIC_PART) * work_s
    total_s = np.bincount(batch, weights=inference_s, minlength=len(batches))
    order = np.argsort(batch, kind="stable")
    by_batch = np.split(trials[order], np.cumsum(np.bincount(batch, minlength=len(batches)))[:-1])
    load_s = LOAD_PART * np.array([np.median(jobs.run_s[one]) for one in by_batch])
    drawn = random.Random(f"{seed}/batches").sample(
        range(len(batches)), min(SIMULATED, len(batches))
    )
    ratios = [
        ratio
        for one in drawn
        if (ratio := _ratios(jobs.run_s[by_batch[one]] * jobs.gpus[by_batch[one]], gpus_per_node))
    ]
    held_ratio = statistics.fmean(held for held, _ in ratios) if ratios else 1.0
    scores_ratio = statistics.fmean(scores for _, scores in ratios) if ratios else 1.0
    ideal_s = total_s / gpus_per_node
    run_s = load_s + held_ratio * ideal_s
    kept = np.flatnonzero(batches.of_job < 0)
    user = np.array([jobs.user[one[0]] for one in by_batch], dtype=np.int64)
    pool = np.array([jobs.pool[one[0]] for one in by_batch], dtype=np.int64)
    number = len(batches)
    submit_s = np.concatenate([jobs.submit_s[kept], batches.last_s])
    in_order = np.argsort(submit_s, kind="stable")

    def column(name: str, values: np.ndarray) -> np.ndarray:
        return np.concatenate([getattr(jobs, name)[kept], values])[in_order]

    evaluation = places(jobs.types, EVALUATION) or 0
    made = replace(
        jobs,
        submit_s=submit_s[in_order],
        run_s=column("run_s", run_s),
        gpus=column("gpus", np.full(number, gpus_per_node)),
        user=column("user", user),
        type=column("type", np.full(number, evaluation)),
        pool=column("pool", pool),
        predicted_s=column("predicted_s", run_s),
        queue_s=column("queue_s", np.full(number, np.nan)),
    )
    return Decoupled(
        jobs=made,
        batch=np.concatenate([np.full(len(kept), -1), np.arange(number)])[in_order],
        scores_s=load_s + scores_ratio * ideal_s,
        held_ratio=held_ratio,
        scores_ratio=scores_ratio,
        simulated=len(ratios),
    )


def _ratios(work_s: Floats, gpus: int) -> tuple[float, float] | None:
    """Simulate the coordinator of one batch.

    Returns:
        The time until the GPUs are free, and the time until the last score, each divided by the
        ideal time; None if no trial generates a token.
    """
    tasks = []
    for number, one_s in enumerate(work_s.tolist()):
        tokens = round((1 - LOAD_PART - METRIC_PART) * one_s / _SAMPLES / _TOKEN_S)
        if tokens:
            tasks.append(
                SimTask(
                    name=f"trial {number}",
                    prompt_tokens=[1] * _SAMPLES,
                    new_tokens=[tokens] * _SAMPLES,
                    max_new_tokens=tokens,
                    metric_s=[METRIC_PART * one_s / _SAMPLES] * _SAMPLES,
                )
            )
    if not tasks:
        return None
    cluster = SimCluster(
        engines_per_node=gpus,
        curve=Curve(
            prefill_tokens_per_s=1e9,
            request_s=0.0,
            step_base_s=_TOKEN_S,
            step_sequence_s=0.0,
            max_batch=1,
        ),
        engine_start_s=0.0,
    )
    workload = Workload(tasks=tuple(tasks), models=(SimModel(size_bytes=0.0),))
    outcome = simulate(workload, cluster, history=workload.history(0.0, 0), record=True)
    ideal_s = sum(_SAMPLES * task.new_tokens[0] for task in tasks) * _TOKEN_S / gpus
    free_s = max(request.t1 for request in outcome.timeline.requests)
    return free_s / ideal_s, outcome.makespan_s / ideal_s
