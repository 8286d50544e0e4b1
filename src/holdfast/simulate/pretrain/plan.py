"""Advise on a job from the records of earlier jobs: interval between saves, spares and timeouts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.core.accounting import IncidentSummary, LostCause, RunSummary
from holdfast.core.errors import BadUse
from holdfast.simulate.pretrain.answers import (
    Answer,
    Band,
    Progress,
    best_interval,
    replicate,
    spares_needed,
)
from holdfast.simulate.pretrain.causes import (
    DAY_S,
    EARLY_MIN,
    LARGE_GPUS,
    Rates,
    own_rates,
    pooled,
)
from holdfast.simulate.pretrain.scenario import Scenario, holdfast
from holdfast.simulate.pretrain.streams import draws

PRIOR: Final = ("llama3", "rsc-1", "rsc-2", "h200")
"""The published failure rates whose mean is assumed until a user's own records have a failure."""
FAILED: Final = {"FAILED": "", "NODE_FAIL": "NodeFailure"}
"""The final states that mean a failure, each with the reason to use if the record has none."""
LEAST: Final = 3
"""The least number of measurements of a time. With fewer, the packaged time is used."""
FACTORS: Final[dict[str, str]] = {
    "failure rate": "",
    "interval of saves": "interval_s",
    "stall of a save": "stall_s",
    "detection of a hang": "hang_s",
    "start of the processes": "start_s",
    "first step": "first_step_s",
    "tests of the nodes": "node_tests_s",
    "repair of a node": "long_repair_s",
    "response of a person": "response_s",
    "failures that hang": "hangs",
}
"""The inputs that the tornado (a chart of the effect of each input) varies, each with its field of
the scenario.
"""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Figures from the records of earlier runs.

    Attributes:
        runs: the number of runs.
        reasons: the diagnosed reason of each failure that came after the first step of its run.
        gpu_days, job_days: the training time in GPU-days and in days.
        stall_s, start_s, restore_s, first_step_s, teardown_s, diagnosis_s: the medians; None if
            there are too few measurements.
        longest_step_s: the longest step, or pause between steps, that did not end in a failure.
        longest_start_s: the longest time from the start of the processes to the first step.
        gpus: the number of GPUs of the largest run.
    """

    runs: int
    reasons: tuple[str, ...]
    gpu_days: float
    job_days: float
    gpus: int
    stall_s: float | None = None
    start_s: float | None = None
    restore_s: float | None = None
    first_step_s: float | None = None
    teardown_s: float | None = None
    diagnosis_s: float | None = None
    longest_step_s: float | None = None
    longest_start_s: float | None = None

    @classmethod
    def of(
        cls, summaries: Sequence[RunSummary], *, longest_step_s: float | None = None
    ) -> "Records":
        """Compute the figures from the summaries of runs.

        Args:
            summaries: the summaries of the runs.
            longest_step_s: the longest step in the journals of the runs; None if there are no
                journals.
        """
        reasons: list[str] = []
        gpu_days = job_days = 0.0
        starts_s: list[float] = []
        for one in summaries:
            trained = [
                (attempt, max(0.0, attempt.ended_at_s - attempt.first_step_at_s))
                for attempt in one.attempts
                if attempt.first_step_at_s is not None and attempt.ended_at_s is not None
            ]
            with_steps = {attempt.number for attempt, _ in trained}
            days = sum(seconds for _, seconds in trained) / DAY_S
            job_days += days
            gpu_days += days * (one.world_size or 1)
            reasons += [
                str(cost.incident.diagnosis.get("reason", ""))
                for cost in one.incidents
                if cost.incident.attempt in with_steps
            ]
            starts_s += [
                attempt.first_step_at_s - attempt.started_at_s
                for attempt in one.attempts
                if attempt.first_step_at_s is not None
            ]
        stalls_s = [own.median_stall_s for one in summaries for own in one.checkpoints.by_attempt]
        return cls(
            runs=len(summaries),
            reasons=tuple(reasons),
            gpu_days=gpu_days,
            job_days=job_days,
            gpus=max((one.world_size or 1 for one in summaries), default=1),
            stall_s=_median(stalls_s, least=1),
            start_s=_median(_costs(summaries, "start")),
            restore_s=_median(_costs(summaries, "restore")),
            first_step_s=_median(_costs(summaries, "first_step")),
            teardown_s=_median(_costs(summaries, "teardown")),
            diagnosis_s=_median(_costs(summaries, "diagnosis")),
            longest_step_s=longest_step_s,
            longest_start_s=max(starts_s, default=None),
        )

    @classmethod
    def of_jobs(cls, jobs: Sequence[tuple[float, float, str, str | None]]) -> "Records":
        """Compute the figures from the jobs in the trace of a scheduler.

        Only jobs with at least `LARGE_GPUS` GPUs count; if there are none, all jobs count. A
        failure in the first `EARLY_MIN` minutes is attributed to new code, and does not count.

        Args:
            jobs: for each job, the number of GPUs, the run time in seconds, the final state, and
                the reason of the failure (None if unknown).
        """
        large = [job for job in jobs if job[0] >= LARGE_GPUS] or list(jobs)
        failed = [job for job in large if job[2] in FAILED and job[1] >= 60 * EARLY_MIN]
        return cls(
            runs=len(large),
            reasons=tuple(reason or FAILED[state] for _, _, state, reason in failed),
            gpu_days=sum(gpus * run_s for gpus, run_s, _, _ in large) / DAY_S,
            job_days=sum(run_s for _, run_s, _, _ in large) / DAY_S,
            gpus=max((math.ceil(gpus) for gpus, *_ in large), default=1),
        )


def _costs(summaries: Sequence[RunSummary], cause: LostCause) -> list[float]:
    """Return, for each incident, the seconds of its run that were lost to `cause`."""
    found: list[float] = []
    for one in summaries:
        costs: Sequence[IncidentSummary] = one.incidents
        for cost in costs:
            rank_s = one.lost_time.by_incident.get(cost.number, {}).get(cause)
            if rank_s is not None and one.lost_time.ranks:
                found.append(rank_s / one.lost_time.ranks)
    return found


def _median(values: Sequence[float], *, least: int = LEAST) -> float | None:
    return statistics.median(values) if len(values) >= least else None


@dataclass(frozen=True, kw_only=True)
class Swing:
    """The change of the ETTR if an input is halved, and if the input is doubled."""

    name: str
    half: float
    twice: float
    """The mean ETTR with twice the input, minus the ETTR of the plan. `half` is the same for half
    the input.
    """
    noise: float
    """Half the width of the 95 % confidence interval of `twice` minus `half`."""

    @property
    def elasticity(self) -> float:
        """The derivative of the ETTR with respect to the natural logarithm of the input."""
        return (self.twice - self.half) / (2 * math.log(2))

    @property
    def width(self) -> float:
        """The absolute difference of the ETTR between half and twice the input."""
        return abs(self.twice - self.half)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended settings for the next job, and the inputs from which they follow."""

    records: Records
    scenario: Scenario
    answer: Answer
    """The replications of the plan, with failure rates drawn from their posterior."""
    mean_time_to_failure_h: Band
    interval_s: float
    interval_ettrs: dict[float, float]
    spares: int
    hang_floor_s: float
    first_step_limit_s: float
    swings: tuple[Swing, ...]
    """The effect of each input, the largest effect first."""
    assumed: tuple[str, ...]
    """The names of the times that are assumed, since the records have too few measurements."""

    @property
    def flags(self) -> str:
        """The advised options of `holdfast run`, for any scheduler.

        `--spares` is not included, since this option needs Slurm or Kubernetes.
        """
        return f"--hang-floor-s {self.hang_floor_s:.0f} --first-step-limit-s {self.first_step_limit_s:.0f}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        records = self.records
        return {
            "gpus": self.scenario.gpus,
            "days": self.scenario.days,
            "runs": records.runs,
            "failures": len(records.reasons),
            "training_days": records.job_days,
            "gpu_days": records.gpu_days,
            "mean_time_to_failure_h": self.mean_time_to_failure_h.to_json(),
            "ettr": self.answer.ettr.to_json(),
            "interventions": self.answer.interventions.to_json(),
            "interval_s": self.interval_s,
            "ettr_by_interval": {f"{at:.6g}": ettr for at, ettr in self.interval_ettrs.items()},
            "spares": self.spares,
            "hang_floor_s": self.hang_floor_s,
            "first_step_limit_s": self.first_step_limit_s,
            "run_options": self.flags,
            "elasticities": [
                {
                    "input": one.name,
                    "half": one.half,
                    "twice": one.twice,
                    "elasticity": one.elasticity,
                    "noise": one.noise,
                }
                for one in self.swings
            ],
            "assumed": list(self.assumed),
            "rates_source": self.scenario.rates.source,
            "gpu_hours_by_failure": self.answer.gpu_hours_by_failure(),
        }


def prior_rates() -> Rates:
    """Return the failure rates to assume until a user's own records have a failure."""
    return pooled(PRIOR)


def advise(
    records: Records,
    *,
    gpus: int | None = None,
    days: float = 30.0,
    replications: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Advice:
    """Advise on the next job.

    Args:
        records: the records of earlier runs.
        gpus: the number of GPUs of the next job; None for the number of the largest earlier run.
        days: the length of the next job, in days.
        replications: the number of simulated runs of the plan. The searches for settings use half
            as many, the tornado twice as many.
        seed: the seed of the first replication.
        progress: called with a description, the number of simulations done, and the number of all.

    Raises:
        BadUse: `gpus` is None and the records have no run, so the size of the job is unknown.
    """
    size = gpus if gpus is not None else records.gpus
    if gpus is None and records.runs == 0:
        raise BadUse("The records have no run. Name the size of the job: holdfast plan --gpus N")
    prior = prior_rates()
    rates = own_rates(
        records.reasons,
        gpu_days=records.gpu_days,
        job_days=records.job_days,
        prior=prior,
        gpus=size,
    )
    measured = {
        "stall_s": records.stall_s,
        "start_s": records.start_s,
        "first_step_s": records.first_step_s,
        "teardown_s": records.teardown_s,
        "diagnosis_s": records.diagnosis_s,
    }
    known = {name: seconds for name, seconds in measured.items() if seconds is not None}
    if "start_s" in known:
        known["start_in_place_s"] = known["start_s"]
    one = holdfast(size, days=days, rates=rates, **known)
    few = max(replications // 2, 4)
    interval_s, tried = best_interval(one, few, seed=seed, progress=progress)
    one = one.varied(interval_s=interval_s)
    spares, _ = spares_needed(one, few, seed=seed, progress=progress)
    one = one.varied(spares=spares)
    answer = replicate(one, replications, seed=seed, uncertain=True, progress=progress)
    return Advice(
        records=records,
        scenario=one,
        answer=answer,
        mean_time_to_failure_h=_mean_time(one, seed),
        interval_s=interval_s,
        interval_ettrs=tried,
        spares=spares,
        hang_floor_s=_limit_s(records.longest_step_s, least_s=60.0),
        first_step_limit_s=_limit_s(records.longest_start_s, least_s=120.0, unknown_s=1800.0),
        swings=tornado(one, 2 * replications, seed=seed, progress=progress),
        assumed=tuple(name for name, seconds in measured.items() if seconds is None),
    )


def _mean_time(one: Scenario, seed: int) -> Band:
    """Return the mean time to failure in hours, and its quantiles under the gamma posterior."""
    mean_h = one.mean_time_to_failure_s() / 3600.0
    shape = one.rates.shape
    if not shape:
        return Band(mean_h, mean_h, mean_h)
    draw = draws(seed, "mean time", 0)
    drawn = [mean_h / draw.gammavariate(shape, 1.0 / shape) for _ in range(2000)]
    band = Band.of(drawn)
    return Band(mean_h, band.low, band.high)


def _limit_s(longest_s: float | None, *, least_s: float, unknown_s: float | None = None) -> float:
    """Return a timeout of twice the longest time seen, but at least `least_s` seconds.

    The factor is 2 since a false alarm costs more than a late one.
    """
    if longest_s is None:
        return least_s if unknown_s is None else unknown_s
    return max(least_s, math.ceil(2 * longest_s))


def tornado(
    one: Scenario, replications: int, *, seed: int = 0, progress: Progress | None = None
) -> tuple[Swing, ...]:
    """Return the effect of each input on the ETTR, the largest effect first.

    All variants meet the same failures.
    """
    base = replicate(one, replications, seed=seed).ettr.mean
    found = []
    for number, (name, attribute) in enumerate(FACTORS.items()):
        half, twice = (
            [
                run.ettr
                for run in replicate(
                    _scaled(one, attribute, factor), replications, seed=seed
                ).outcomes
            ]
            for factor in (0.5, 2.0)
        )
        pairs = [high - low for low, high in zip(half, twice, strict=True)]
        found.append(
            Swing(
                name=name,
                half=statistics.fmean(half) - base,
                twice=statistics.fmean(twice) - base,
                noise=1.96 * statistics.stdev(pairs) / math.sqrt(len(pairs)),
            )
        )
        if progress is not None:
            progress("varying the inputs", number + 1, len(FACTORS))
    return tuple(sorted(found, key=lambda swing: (-swing.width, swing.name)))


def _scaled(one: Scenario, attribute: str, factor: float) -> Scenario:
    if not attribute:
        return one.varied(rates=_scaled_rates(one.rates, factor))
    changes: dict[str, float] = {}
    for part in (one, one.saves, one.times, one.people, one.hardware):
        if hasattr(part, attribute):
            changes[attribute] = getattr(part, attribute) * factor
    if attribute == "start_s":
        changes["start_in_place_s"] = one.times.start_in_place_s * factor
    if attribute == "hangs":
        changes["hangs"] = min(one.hangs * factor, 1.0)
    return one.varied(**changes)


def _scaled_rates(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        per_gpu_day=rates.per_gpu_day * factor,
        per_job_day=rates.per_job_day * factor,
    )
