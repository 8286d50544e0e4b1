"""Define the causes of failures and their rates.

The rates come from Table 3 of the study, from other publications, or from a user's own records.
"""

import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final, Literal

from holdfast.core.errors import BadUse

DAY_S: Final = 86400.0
LARGE_GPUS: Final = 256.0
"""A job counts as large from this number of GPUs on. Large jobs take nearly all GPU time of
pretraining.
"""
EARLY_MIN: Final = 10.0
"""Failures in the first minutes of a job, up to this number, are left out: new code or settings
cause them, so they strike only the first start of a job.
"""
TABLE3: Final = "table3"

Shows = Literal["exit", "hang", "spike", "nan", "slow"]
LostMemory = Literal["process", "node", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A cause of failures; `tables/causes.toml` describes the fields."""

    name: str
    by_node: bool
    shows: Shows = "exit"
    loses: LostMemory = "process"
    restart_helps: bool = True
    waits_for_outside: bool = False
    needs_node: float = 0.0
    """The share of these failures that recur until the node is taken out of the job."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The failure rates of a job, by cause.

    Attributes:
        name: the name of the source.
        per_gpu_day: hardware failures per GPU and day.
        per_job_day: failures per day that software or people cause. This rate does not depend on
            the size of the job.
        node_mix, job_mix: the weights of the causes among hardware failures and among the other
            failures.
        shape: the shape parameter of the rates' gamma posterior; None if the rates are certain.
        source: the citation of the publication.
    """

    name: str
    per_gpu_day: float
    per_job_day: float
    node_mix: tuple[tuple[Cause, float], ...]
    job_mix: tuple[tuple[Cause, float], ...]
    shape: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("per_gpu_day", "per_job_day"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise BadUse(f"The rate {name} is {value}. Give a number of 0 or more.")

    def mean_time_to_failure_s(self, gpus: int) -> float:
        """Return the mean training time between failures of a job on `gpus` GPUs, in seconds."""
        a_day = self.per_gpu_day * gpus + self.per_job_day
        return DAY_S / a_day if a_day > 0 else math.inf


@dataclass(frozen=True)
class _Tables:
    causes: dict[str, Cause]
    rates: dict[str, dict[str, Any]]
    table3: list[tuple[str, float, float, float, float, float, float]]
    failed_gpu_hours: float
    failed_share: float
    mix: dict[str, dict[str, float]] = field(default_factory=dict)


@cache
def _tables() -> _Tables:
    folder = resources.files("holdfast.simulate.pretrain").joinpath("tables")
    read = tomllib.loads(folder.joinpath("causes.toml").read_text("utf-8"))
    causes = {
        name: Cause(
            name=name,
            by_node=stream == "node",
            shows=shows,
            loses=loses,
            restart_helps=helps,
            waits_for_outside=waits,
            needs_node=needs,
        )
        for name, stream, shows, loses, helps, waits, needs in read["causes"]
    }
    return _Tables(
        causes=causes,
        rates=tomllib.loads(folder.joinpath("rates.toml").read_text("utf-8")),
        table3=[tuple(row) for row in read["table3"]],
        failed_gpu_hours=read["table3_failed_gpu_hours"],
        failed_share=read["table3_failed_share"],
        mix=read["mix"],
    )


def cause(name: str) -> Cause:
    """Return the packaged cause called `name`."""
    return _tables().causes[name]


def known_causes() -> tuple[Cause, ...]:
    """Return all packaged causes."""
    return tuple(_tables().causes.values())


def published() -> tuple[str, ...]:
    """Return the names of the packaged failure rates."""
    return tuple(_tables().rates)


def rates_named(name: str) -> Rates:
    """Return the packaged failure rates called `name`.

    Raises:
        BadUse: no packaged rates have this name.
    """
    found = _tables().rates.get(name)
    if found is None:
        raise BadUse(f"There are no rates named {name!r}. Choose one of: {', '.join(published())}.")
    if name == TABLE3:
        return table3()
    return Rates(
        name=name,
        per_gpu_day=found["per_gpu_day"],
        per_job_day=found["per_job_day"],
        node_mix=_mix("node"),
        job_mix=_mix("job"),
        shape=float(found["failures"]) or None,
        source=found["source"],
    )


def _mix(stream: str) -> tuple[tuple[Cause, float], ...]:
    tables = _tables()
    return tuple((tables.causes[name], weight) for name, weight in tables.mix[stream].items())


def table3() -> Rates:
    """Return the failure rates of the study's Table 3 for a large job past its first minutes.

    A failure counts if the job had at least `LARGE_GPUS` GPUs and had run for at least `EARLY_MIN`
    minutes. Table 3 does not state how many failures these are, so the count is estimated for each
    reason. The
    number of GPUs and the time to failure are modelled as a bivariate lognormal distribution, with
    the means and medians of the reason. Their correlation is chosen so that the model
    gives the reason the share of GPU time that Table 3 states.

    The exposure, by which the numbers of failures are divided, is the GPU time of all jobs. This
    time is the GPU time of failed jobs divided by their share of all GPU time.
    """
    tables = _tables()
    gpu_days = tables.failed_gpu_hours / tables.failed_share / 24.0
    node: list[tuple[Cause, float]] = []
    job: list[tuple[Cause, float]] = []
    for row in tables.table3:
        one = tables.causes[row[0]]
        weight = row[1] * large_and_late(row, tables.failed_gpu_hours)
        (node if one.by_node else job).append((one, weight))
    large = [(row[1] * row[2], row[1]) for row in tables.table3 if row[2] >= LARGE_GPUS]
    mean_gpus = sum(gpus for gpus, _ in large) / sum(number for _, number in large)
    return Rates(
        name=TABLE3,
        per_gpu_day=sum(weight for _, weight in node) / gpu_days,
        per_job_day=sum(weight for _, weight in job) / (gpu_days / mean_gpus),
        node_mix=tuple(node),
        job_mix=tuple(job),
        shape=sum(weight for _, weight in (*node, *job)),
        source=tables.rates[TABLE3]["source"],
    )


def large_and_late(
    row: tuple[str, float, float, float, float, float, float], gpu_hours: float
) -> float:
    """Return the share of a reason's failures that struck large jobs after their first minutes.

    Args:
        row: a row of Table 3: the reason, the number of failures, mean and median GPUs, mean and
            median minutes to failure, and the percentage of GPU time.
        gpu_hours: the GPU-hours of all failed jobs.
    """
    _, number, gpus, gpus_mid, minutes, minutes_mid, percent = row
    spread_gpus, spread_min = _spread(gpus, gpus_mid), _spread(minutes, minutes_mid)
    mean_product = percent / 100 * gpu_hours * 60 / number
    # E[G T] = E[G] E[T] exp(rho s t) of a bivariate lognormal.
    rho = math.log(max(mean_product / (gpus * minutes), 1e-9)) / (spread_gpus * spread_min)
    rho = min(max(rho, -0.95), 0.95)
    mid_gpus = math.log(gpus) - spread_gpus**2 / 2
    mid_min = math.log(minutes) - spread_min**2 / 2
    return _upper_quadrant(
        (math.log(LARGE_GPUS) - mid_gpus) / spread_gpus,
        (math.log(EARLY_MIN) - mid_min) / spread_min,
        rho,
    )


def _spread(mean: float, median: float) -> float:
    """Return the sigma of a lognormal; 0.3, a narrow one, if the median is not below the mean."""
    return math.sqrt(2 * math.log(mean / median)) if mean > median * 1.05 else 0.3


def _upper_quadrant(x: float, y: float, rho: float) -> float:
    """Return P(X > x, Y > y) for two standard normal variables with correlation `rho`."""
    low, high, parts = max(x, -8.0), 8.0, 400
    if low >= high:
        return 0.0
    width, total = (high - low) / parts, 0.0
    root = math.sqrt(2 * (1 - rho * rho))
    for part in range(parts):
        at = low + (part + 0.5) * width
        total += math.exp(-at * at / 2) * math.erfc((y - rho * at) / root) / 2
    return total * width / math.sqrt(2 * math.pi)


def own_rates(
    reasons: Iterable[str], *, gpu_days: float, job_days: float, prior: Rates, gpus: int
) -> Rates:
    """Estimate failure rates from a user's own records, with a gamma prior worth one failure.

    Args:
        reasons: the diagnosed reason of each failure. An unknown reason counts as a failure of the
            software.
        gpu_days: the training time in GPU-days.
        job_days: the training time in days.
        prior: the rates to assume before the first failure.
        gpus: the number of GPUs of the job, which determines how many days of training are worth
            one failure of the prior.

    Returns:
        The posterior means; `shape` is the number of failures plus 1.
    """
    known = _tables().causes
    found = [known.get(name, known["software"]) for name in reasons]
    prior_days = prior.mean_time_to_failure_s(gpus) / DAY_S
    if not math.isfinite(prior_days):
        prior_days = 0.0
    node = [one for one in found if one.by_node]
    job = [one for one in found if not one.by_node]
    prior_node = prior.per_gpu_day * gpus * prior_days
    prior_job = prior.per_job_day * prior_days
    exposure_gpu, exposure_job = gpu_days + prior_days * gpus, job_days + prior_days
    return Rates(
        name="own",
        per_gpu_day=(len(node) + prior_node) / exposure_gpu if exposure_gpu else 0.0,
        per_job_day=(len(job) + prior_job) / exposure_job if exposure_job else 0.0,
        node_mix=_counted(node, prior.node_mix, prior_node),
        job_mix=_counted(job, prior.job_mix, prior_job),
        shape=len(found) + 1.0,
        source=f"{len(found)} failures in {job_days:.3g} days of training, and a prior worth one: {prior.source}",
    )


def _counted(
    found: Iterable[Cause], prior: tuple[tuple[Cause, float], ...], worth: float
) -> tuple[tuple[Cause, float], ...]:
    total = sum(weight for _, weight in prior)
    weights: dict[Cause, float] = {one: worth * weight / total for one, weight in prior if total}
    for one in found:
        weights[one] = weights.get(one, 0.0) + 1.0
    return tuple(weights.items())


def picked(mix: Iterable[tuple[Cause, float]], uniform: float) -> Cause:
    """Return the cause at the quantile `uniform` (0 to 1) of the weighted causes `mix`.

    Raises:
        ValueError: the mix is empty.
    """
    pairs = [pair for pair in mix if pair[1] > 0]
    if not pairs:
        raise ValueError("no causes")
    left = uniform * sum(weight for _, weight in pairs)
    for one, weight in pairs:
        left -= weight
        if left < 0:
            return one
    return pairs[-1][0]


def weights(mix: Iterable[tuple[Cause, float]]) -> Mapping[str, float]:
    """Return the share of each cause in the weighted causes `mix`, by name."""
    pairs = list(mix)
    total = sum(weight for _, weight in pairs)
    return {one.name: weight / total for one, weight in pairs if total}


def pooled(names: Iterable[str]) -> Rates:
    """Return the mean of several published rates, with their spread as the uncertainty.

    The shape of the gamma posterior follows from the standard deviation of the rates per GPU.

    Raises:
        BadUse: no packaged rates have one of the names.
        ValueError: there are fewer than two names.
    """
    found = [rates_named(name) for name in names]
    if len(found) < 2:
        raise ValueError("a spread needs two rates")
    per_gpu = [one.per_gpu_day for one in found]
    mean, spread = statistics.fmean(per_gpu), statistics.stdev(per_gpu)
    return Rates(
        name="pooled",
        per_gpu_day=mean,
        per_job_day=statistics.fmean([one.per_job_day for one in found]),
        node_mix=found[0].node_mix,
        job_mix=found[0].job_mix,
        shape=(mean / spread) ** 2 if spread else None,
        source="; ".join(one.source for one in found),
    )
