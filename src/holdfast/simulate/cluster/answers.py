"""Compute how a policy changes the waits, utilisation, fragmentation and evaluations of a trace."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.core.words import plainly
from holdfast.simulate.arrivals import GAP_S, MIN_JOBS
from holdfast.simulate.cluster.decoupled import Batches, batches_of, decouple
from holdfast.simulate.cluster.engine import HOUR_S, Progress, ReplayOutcome, replay
from holdfast.simulate.cluster.jobs import EVALUATION, Floats, Jobs, Replayed, places
from holdfast.simulate.cluster.policy import Flags, Policy, classes


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Statistics of the waiting times of jobs, in seconds; each is None if there are no jobs."""

    mean_s: float | None
    median_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, waits_s: Floats) -> "Waits":
        """Compute the mean, the median and the 95 % quantile of `waits_s`."""
        if not len(waits_s):
            return cls(mean_s=None, median_s=None, p95_s=None)
        median_s, p95_s = np.quantile(waits_s, [0.5, 0.95]).tolist()
        return cls(mean_s=float(waits_s.mean()), median_s=median_s, p95_s=p95_s)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The distance between simulated and recorded waits, over the jobs with a wait in the trace."""

    jobs: int
    ks: float
    """The Kolmogorov-Smirnov distance: the largest difference of the two distribution functions."""
    wasserstein_s: float
    """The mean change of a wait that would turn one distribution into the other, in seconds."""

    @classmethod
    def of(cls, ours_s: Floats, theirs_s: Floats) -> "Distance | None":
        """Compare two equally long arrays of waits; return None if they are empty.

        Args:
            ours_s: the simulated waits in seconds.
            theirs_s: the waits of the same jobs in the trace, in seconds.
        """
        number = len(ours_s)
        if not number:
            return None
        ours_s, theirs_s = np.sort(ours_s), np.sort(theirs_s)
        values = np.concatenate([ours_s, theirs_s])
        parts = [np.searchsorted(one, values, side="right") / number for one in (ours_s, theirs_s)]
        return cls(
            jobs=number,
            ks=float(np.abs(parts[0] - parts[1]).max()),
            wasserstein_s=float(np.abs(ours_s - theirs_s).mean()),
        )


@dataclass(frozen=True, kw_only=True)
class OfType:
    """The figures for the jobs of one type."""

    type: str
    jobs: int
    simulated: Waits
    trace: Waits
    distance: Distance | None
    gpu_hours: float


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """The figures for the evaluations of checkpoints, run as batches of trials or by coordinators."""

    checkpoints: int
    mean_s: float
    """The mean time from a checkpoint's first submission to its last score, in seconds."""
    median_s: float
    gpu_hours: float
    """GPU-hours held by the evaluations, including runs that were preempted and lost."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The figures of one replay."""

    name: str
    jobs: int
    types: tuple[OfType, ...]
    utilisation: float
    useful_gpu_hours: float
    lost_gpu_hours: float
    idle_gpu_hours: float
    restarts: int
    backfilled: int
    partly_used_nodes: float
    """The share of nodes with some GPUs in use and some free; the mean over all whole hours."""
    free_on_partly_used: float
    """The number of free GPUs on these partly used nodes; the mean over all whole hours."""
    largest_fit_median: float
    evaluations: Evaluations | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterAnswer:
    """The result of replaying a trace under a policy."""

    replayed: Replayed
    policy: Policy
    variants: tuple[Variant, ...]
    """The replay of the jobs as submitted; then, if requested, the replay with decoupled
    evaluation.
    """
    outcomes: tuple[ReplayOutcome, ...]
    trace_utilisation: float | None
    """The utilisation under the schedule that the trace recorded; None if the trace has no waits.
    """
    coordinator: dict[str, float]
    """The figures of the coordinator's model."""

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain JSON values, without the single jobs."""
        one = self.replayed
        return {
            "cluster": one.cluster,
            "nodes": one.nodes,
            "gpus_per_node": one.gpus_per_node,
            "left_out": dict(one.left_out),
            "policy": {**asdict(self.policy), "best_effort": list(self.policy.best_effort)},
            "trace_utilisation": self.trace_utilisation,
            "coordinator": self.coordinator,
            "variants": [asdict(variant) for variant in self.variants],
        }


def answer(
    replayed: Replayed,
    policy: Policy,
    *,
    decoupled: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> ClusterAnswer:
    """Replay a trace under a policy, and optionally again with decoupled evaluation.

    Args:
        replayed: the jobs and the cluster.
        policy: the reserved nodes, the limits and the best-effort jobs.
        decoupled: replay a second time, with a coordinator for each checkpoint's evaluation.
        seed: the seed of all random draws.
        progress: called from time to time with a description, the number of jobs that have arrived,
            and the number of all jobs.

    Raises:
        BadUse: the policy does not suit the jobs, or there is no evaluation to decouple.
    """
    jobs, per = replayed.jobs, replayed.gpus_per_node
    batches = batches_of(jobs, gpus_per_node=per)
    if decoupled and not len(batches):
        raise BadUse(
            f"There is no evaluation to decouple: no {MIN_JOBS} jobs of type {EVALUATION}, each of at most a node, "
            f"that a user submitted within {GAP_S / 60:.0f} minutes of each other. Leave --decoupled out."
        )
    outcome = _replay(jobs, replayed, policy, progress)
    ended_s = np.zeros(len(batches))
    trial = batches.of_job >= 0
    np.maximum.at(ended_s, batches.of_job[trial], outcome.end_s[trial])
    variants = [_variant("as submitted", jobs, outcome, replayed, batches, ended_s, trial)]
    outcomes, coordinator = [outcome], {}
    if decoupled:
        other = decouple(jobs, batches, gpus_per_node=per, seed=seed)
        try:
            outcome = _replay(other.jobs, replayed, policy, progress)
        except BadUse as error:
            raise BadUse(
                f"With --decoupled, a job of a whole node takes the place of the trials. {error}"
            ) from error
        made = other.batch >= 0
        started_s = np.zeros(len(batches))
        started_s[other.batch[made]] = outcome.start_s[made]
        ended_s = started_s + other.scores_s
        variants.append(
            _variant("decoupled", other.jobs, outcome, replayed, batches, ended_s, made)
        )
        outcomes.append(outcome)
        coordinator = {
            "held_ratio": other.held_ratio,
            "scores_ratio": other.scores_ratio,
            "simulated_batches": other.simulated,
        }
    return ClusterAnswer(
        replayed=replayed,
        policy=policy,
        variants=tuple(variants),
        outcomes=tuple(outcomes),
        trace_utilisation=_trace_utilisation(replayed),
        coordinator=coordinator,
    )


def _replay(
    jobs: Jobs, replayed: Replayed, policy: Policy, progress: Progress | None
) -> ReplayOutcome:
    per = replayed.gpus_per_node
    sorted_into = classes(jobs, policy, nodes=replayed.nodes, gpus_per_node=per)
    return replay(jobs, sorted_into, gpus_per_node=per, mode=policy.mode, progress=progress)


def _variant(
    name: str,
    jobs: Jobs,
    outcome: ReplayOutcome,
    replayed: Replayed,
    batches: Batches,
    ended_s: Floats,
    evaluated: Flags,
) -> Variant:
    waits_s = outcome.first_start_s - jobs.submit_s
    hours = jobs.gpus * jobs.run_s / HOUR_S
    types = []
    for number, word in enumerate(jobs.types):
        those = jobs.type == number
        if those.any():
            known = those & ~np.isnan(jobs.queue_s)
            types.append(
                OfType(
                    type=word,
                    jobs=int(those.sum()),
                    simulated=Waits.of(waits_s[those]),
                    trace=Waits.of(jobs.queue_s[known]),
                    distance=Distance.of(waits_s[known], jobs.queue_s[known]),
                    gpu_hours=float(hours[those].sum()),
                )
            )
    evaluations = None
    if len(batches):
        took_s = ended_s - batches.first_s
        evaluations = Evaluations(
            checkpoints=len(batches),
            mean_s=float(took_s.mean()),
            median_s=float(np.median(took_s)),
            gpu_hours=float(
                hours[evaluated].sum() + outcome.lost_by_job_gpu_s[evaluated].sum() / HOUR_S
            ),
        )
    return Variant(
        name=name,
        jobs=len(jobs),
        types=tuple(types),
        utilisation=outcome.utilisation,
        useful_gpu_hours=outcome.useful_gpu_s / HOUR_S,
        lost_gpu_hours=outcome.lost_gpu_s / HOUR_S,
        idle_gpu_hours=outcome.idle_gpu_s / HOUR_S,
        restarts=int(outcome.restarts.sum()),
        backfilled=outcome.backfilled,
        partly_used_nodes=float(outcome.partly_used_nodes.mean() / replayed.nodes),
        free_on_partly_used=float(outcome.free_on_partly_used.mean()),
        largest_fit_median=float(np.median(outcome.largest_fit)),
        evaluations=evaluations,
    )


def _trace_utilisation(replayed: Replayed) -> float | None:
    """Return the share of all GPU time, up to the last submission, that jobs held in the trace."""
    jobs = replayed.jobs
    last_s = float(jobs.submit_s[-1])
    known = ~np.isnan(jobs.queue_s)
    if not known.any() or not last_s:
        return None
    start_s = (jobs.submit_s + jobs.queue_s)[known]
    held_s = np.clip(np.minimum(start_s + jobs.run_s[known], last_s) - start_s, 0, None)
    return float((held_s * jobs.gpus[known]).sum() / last_s) / (
        replayed.nodes * replayed.gpus_per_node
    )


def assumptions(chosen: ClusterAnswer, *, reserve_given: bool) -> Sequence[str]:
    """Return the assumptions that the replay makes beyond the trace, one sentence each."""
    policy, types = chosen.policy, chosen.replayed.jobs.types
    lines = [
        "A job of several nodes takes whole nodes; all its GPUs are packed on as few nodes as possible.",
        "Backfill predicts run times: the mean of the user's last two jobs of a type and size, up to a power of two.",
        "Jobs arrive and run as in the trace, though some were cancelled because they waited.",
    ]
    if number := chosen.replayed.on_parts_of_gpus:
        lines.append(
            f"{plainly(number, 'job')} on a part of a GPU: each holds whole GPUs, so that waits are longer than real."
        )
    if not reserve_given:
        nodes = ", ".join(f"{name} {number}" for name, number in policy.reserved_nodes.items())
        lines.append(
            f"Nodes reserved: {nodes}; the peak of the type's jobs, as no trace states it."
            if nodes
            else "No nodes are reserved: there is no pretraining, or no room beside the largest other job."
        )
    if places(types, EVALUATION) is not None:
        lines.append(
            "Evaluation is at best effort: "
            + (
                "on any idle GPU, run again from its beginning when others need the GPU."
                if policy.mode == "preemptible"
                else "after all others, off the reserved nodes, never ended for others."
            )
        )
    if chosen.coordinator:
        lines.append(
            "A trial spends 29.5 % of its time on loading and 19 % on metrics, as figure 13 of the study measured once."
        )
    return lines
