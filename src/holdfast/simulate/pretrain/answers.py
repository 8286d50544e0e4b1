"""Repeat a simulation, to compute the mean and the spread of its figures.

Also find the best interval between saves and the number of spares needed. Replication r of every
variant of a scenario meets the same failures, so that differences between variants are not due to
chance.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core.accounting import LOST_CAUSES, gpu_hours
from holdfast.core.errors import BadUse
from holdfast.simulate.pretrain.account import Outcome
from holdfast.simulate.pretrain.formulas import daly_interval_s
from holdfast.simulate.pretrain.run import run
from holdfast.simulate.pretrain.scenario import Scenario
from holdfast.simulate.pretrain.streams import draws

MISSING: Final = 0.001
"""The spares are enough if nodes are missing for at most this share of the time."""

MIN_FAILURES: Final = 30
"""The least number of failures in all replications for a search of the best interval. With fewer
failures, chance would decide.
"""

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True, slots=True)
class Band:
    """The mean of a figure over replications, and its 5 % and 95 % quantiles."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Band":
        """Return the band of `values`, one value per replication."""
        ordered = sorted(values)
        return cls(statistics.fmean(ordered), _quantile(ordered, 0.05), _quantile(ordered, 0.95))

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return {"mean": self.mean, "p05": self.low, "p95": self.high}


def _quantile(ordered: Sequence[float], part: float) -> float:
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The replications of a scenario, and figures over all of them."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]

    def band(self, figure: Callable[[Outcome], float]) -> Band:
        """Return the band of a figure; `figure` computes it from one replication."""
        return Band.of([figure(one) for one in self.outcomes])

    @property
    def ettr(self) -> Band:
        """The effective training time ratio (see `Outcome.ettr`)."""
        return self.band(lambda one: one.ettr)

    @property
    def goodput(self) -> Band:
        """The goodput (see `Outcome.goodput`)."""
        return self.band(lambda one: one.goodput)

    @property
    def interventions(self) -> Band:
        """The number of times that a person was needed in a run."""
        return self.band(lambda one: float(one.interventions))

    @property
    def failures(self) -> Band:
        """The number of incidents in a run."""
        return self.band(lambda one: float(len(one.incidents)))

    def gpu_hours_by_class(self) -> dict[str, float]:
        """Return the mean GPU-hours by cause of lost time, without causes that took no time."""
        count = len(self.outcomes)
        return {
            name: gpu_hours(hours)
            for name in LOST_CAUSES
            if (
                hours := sum(one.lost_time.by_cause.get(name, 0.0) for one in self.outcomes) / count
            )
        }

    def gpu_hours_by_failure(self) -> dict[str, float]:
        """Return the mean GPU-hours that failures of each cause cost, the largest first."""
        total: dict[str, float] = {}
        for one in self.outcomes:
            for name, rank_s in one.rank_s_by_failure().items():
                total[name] = total.get(name, 0.0) + rank_s / len(self.outcomes)
        return {name: gpu_hours(total[name]) for name in sorted(total, key=lambda n: -total[n])}

    def failures_by_cause(self) -> dict[str, float]:
        """Return the mean number of incidents by cause."""
        total: dict[str, float] = {}
        for one in self.outcomes:
            for name, number in one.failures().items():
                total[name] = total.get(name, 0.0) + number / len(self.outcomes)
        return {name: total[name] for name in sorted(total, key=lambda n: -total[n])}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        one = self.scenario
        return {
            "scenario": one.name,
            "gpus": one.gpus,
            "nodes": one.nodes,
            "spares": one.hardware.spares,
            "days": one.days,
            "interval_s": one.saves.interval_s,
            "rates": one.rates.name,
            "rates_source": one.rates.source,
            "mean_time_to_failure_s": one.mean_time_to_failure_s(),
            "replications": len(self.outcomes),
            "ettr": self.ettr.to_json(),
            "goodput": self.goodput.to_json(),
            "interventions": self.interventions.to_json(),
            "failures": self.failures.to_json(),
            "nodes_under_repair": self.band(lambda each: float(each.nodes_out)).to_json(),
            "gpu_hours_by_class": self.gpu_hours_by_class(),
            "gpu_hours_by_failure": self.gpu_hours_by_failure(),
            "failures_by_cause": self.failures_by_cause(),
        }


def replicate(
    scenario: Scenario,
    replications: int,
    *,
    seed: int = 0,
    uncertain: bool = False,
    progress: Progress | None = None,
) -> Answer:
    """Simulate a scenario several times.

    Args:
        scenario: the simulated scenario.
        replications: the number of simulated runs.
        seed: the seed of the first replication. With equal seeds, replication r of two scenarios
            meets the same failures.
        uncertain: True to draw the failure rates of each replication from their gamma posterior.
        progress: called with a description, the number of replications done, and the number of all.

    Raises:
        BadUse: `replications` is below 1.
    """
    if replications < 1:
        raise BadUse(f"{replications} replications are too few. Give 1 or more.")
    outcomes = []
    for number in range(replications):
        own_seed = seed * 1_000_003 + number
        factor = 1.0
        shape = scenario.rates.shape
        if uncertain and shape:
            factor = draws(own_seed, "rates", 0).gammavariate(shape, 1.0 / shape)
        outcomes.append(run(scenario, own_seed, rate_factor=factor))
        if progress is not None:
            progress(f"simulating {scenario.name}", number + 1, replications)
    return Answer(scenario=scenario, outcomes=tuple(outcomes))


def best_interval(
    scenario: Scenario, replications: int, *, seed: int = 0, progress: Progress | None = None
) -> tuple[float, dict[float, float]]:
    """Return the interval between saves with the greatest ETTR, and the mean ETTR by interval.

    The search tries Daly's interval, and intervals up to four times shorter and longer, in steps of
    a factor of sqrt(2). If the replications have fewer than `MIN_FAILURES` failures, the result
    is Daly's interval.
    """
    first_s = max(
        daly_interval_s(max(scenario.saves.stall_s, 1e-3), scenario.mean_time_to_failure_s()), 1.0
    )
    first_s = min(first_s, scenario.days * 86400.0)
    tried: dict[float, float] = {}
    failures = 0
    for power in range(-4, 5):
        interval_s = first_s * 2 ** (power / 2)
        answer = replicate(scenario.varied(interval_s=interval_s), replications, seed=seed)
        tried[interval_s] = answer.ettr.mean
        if power == 0:
            failures = sum(len(one.incidents) for one in answer.outcomes)
        if progress is not None:
            progress("trying intervals", len(tried), None)
    if failures < MIN_FAILURES:
        return first_s, tried
    return max(tried, key=lambda interval_s: tried[interval_s]), tried


def spares_needed(
    scenario: Scenario, replications: int, *, seed: int = 0, progress: Progress | None = None
) -> tuple[int, float]:
    """Return the least number of spares that keep the job complete almost all the time.

    With these spares, nodes are missing for at most `MISSING` of the time.

    Returns:
        The number of spares, and the share of time in which nodes are missing with so many spares.
    """

    def missing(spares: int) -> float:
        answer = replicate(scenario.varied(spares=spares), replications, seed=seed)
        if progress is not None:
            progress("trying spares", spares, None)
        return answer.band(lambda one: one.part("nodes_missing")).mean

    high, part = 0, missing(0)
    low = -1
    while part > MISSING and high < scenario.nodes:
        low, high = high, max(1, high * 2)
        part = missing(high)
    while high - low > 1:
        middle = (low + high) // 2
        middle_part = missing(middle)
        if middle_part > MISSING:
            low = middle
        else:
            high, part = middle, middle_part
    return high, part
