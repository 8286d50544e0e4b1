"""Compare the study's headline findings with a trace: both numbers, and whether the finding holds.

The claims are data in `findings.toml`: the named number of the analyses, the study's number, and
the bounds within which the finding holds. This module evaluates them and computes the comparisons
that need several numbers.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.core import words
from holdfast.trace.analyses.failures import ALL, ALL_SAID
from holdfast.trace.analyses.selection import slug
from holdfast.trace.schema import TYPES

Numbers = Mapping[str, float]

CLAIMS_FILE: Final = Path(__file__).with_suffix(".toml")
PRIOR_MEDIANS_S: Final = {"Philly": 874.0, "Helios": 206.0, "PAI": 481.0}
"""Median GPU job durations of the traces that the study compares with (Table 2)."""
LEAST_JOBS: Final = 30
"""Least number of jobs for a verdict, and of a type for a comparison of its median."""
LEAST_CAUSES: Final = 100
"""Least number of failures with a cause for a comparison of shares: 6 points are two standard
errors of an 11% share of 100.
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of the study, evaluated for one cluster or for all together."""

    id: str
    """`CLAIM.CLUSTER`, each a slug."""
    cluster: str
    sentence: str
    """The result for this trace, with its number."""
    value: float | None
    """None if the number cannot be computed."""
    unit: str
    """Unit of `value` and of a numeric `study`; `share` is 0 to 1."""
    study: float | str
    """The study's number for this cluster, or the study's words."""
    holds: bool | None
    """None if this trace cannot answer."""
    why: str
    """The bounds in words, or why this trace cannot answer."""
    source: str
    """Place of the finding in the study."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding of the study as a question; the head of `findings.toml` describes the fields."""

    id: str
    asks: str
    unit: str
    study: Mapping[str, float] | str
    because: str
    source: str
    needs: str
    number: str = ""
    measure: str = ""
    decides: str = ""
    ratio: str = ""
    low: float = -math.inf
    high: float = math.inf
    pooled: bool = False
    by_cause: bool = False


@cache
def claims() -> tuple[Claim, ...]:
    """Read every claim, in the order of the report."""
    return tuple(Claim(**claim) for claim in tomllib.loads(CLAIMS_FILE.read_text("utf-8"))["claim"])


def findings(numbers: Numbers, clusters: Sequence[str]) -> tuple[Finding, ...]:
    """Evaluate every claim for every cluster.

    Claims that the study makes for its clusters together are evaluated for all clusters together.

    Args:
        numbers: the named numbers of all analyses; a missing number gives a finding without an
            answer.
        clusters: names of the trace's clusters without the compared ones.
    """
    several = len(clusters) > 1
    by_cluster = [
        _evaluated(claim, ClusterNumbers(numbers, cluster))
        for cluster in clusters
        for claim in claims()
        if not (several and claim.pooled)
    ]
    pooled = [
        _evaluated(claim, ClusterNumbers(numbers, ALL))
        for claim in claims()
        if several and claim.pooled
    ]
    return (*by_cluster, *pooled)


@dataclass(frozen=True)
class ClusterNumbers:
    """The numbers of one cluster."""

    numbers: Numbers
    cluster: str

    def get(self, key: str) -> float | None:
        """Return a number by its key without the cluster; None if it is missing or NaN."""
        number = self.numbers.get(f"{slug(self.cluster)}.{key}")
        return None if number is None or math.isnan(number) else float(number)

    def by_type(self, key: str, *, least_jobs: int = 0) -> dict[str, float]:
        """Return a number by type, for types with at least `least_jobs` jobs or an unknown count."""
        found = {slug(name): self.get(f"{slug(name)}.{key}") for name in TYPES}
        jobs = {name: self.get(f"{name}.n") for name in found}
        return {
            name: value
            for name, value in found.items()
            if value is not None and ((of_it := jobs[name]) is None or of_it >= least_jobs)
        }


def _evaluated(claim: Claim, cluster_numbers: ClusterNumbers) -> Finding:
    value = (
        cluster_numbers.get(claim.number)
        if claim.number
        else MEASURES[claim.measure](cluster_numbers)
    )
    decisive = MEASURES[claim.decides](cluster_numbers) if claim.decides else value
    name = ALL_SAID if cluster_numbers.cluster == ALL else cluster_numbers.cluster
    holds: bool | None = None
    doubt, caveat = _of_causes(cluster_numbers) if claim.by_cause else ("", "")
    jobs = cluster_numbers.get("gpu_job_num")
    if value is None or decisive is None:
        why = f"The trace has no {claim.needs}."
    elif jobs is not None and jobs < LEAST_JOBS:
        few = words.plainly(round(jobs), "GPU job")
        why = f"The trace has {few}; from {LEAST_JOBS} on a comparison is possible."
    elif doubt:
        why = doubt
    else:
        why = f"{claim.because}{caveat}"
        if math.isfinite(claim.low) or math.isfinite(claim.high):
            holds = claim.low <= decisive <= claim.high
    return Finding(
        id=f"{claim.id}.{slug(cluster_numbers.cluster)}",
        cluster=cluster_numbers.cluster,
        sentence=f"{name}: cannot be told."
        if value is None
        else claim.asks.format(cluster=name, value=_compared(value, claim)),
        value=value,
        unit=claim.unit,
        study=_study(claim, slug(cluster_numbers.cluster)),
        holds=holds,
        why=why,
        source=claim.source,
    )


def _of_causes(cluster_numbers: ClusterNumbers) -> tuple[str, str]:
    """Return the reason why failure causes cannot be judged, or ""; and a caveat if they can."""
    recorded, infrastructure = (
        cluster_numbers.get(f"failures.recorded.{key}") or 0.0
        for key in ("number", "infrastructure.number")
    )
    share = cluster_numbers.get("failures.recorded.share_of_failures") or 0.0
    if recorded < LEAST_CAUSES:
        return (
            f"Only {recorded:,.0f} failures have a recorded cause; from {LEAST_CAUSES} on it can be told.",
            "",
        )
    if infrastructure == recorded:
        # The scheduler identifies failures of nodes and gives no cause for other failures.
        return "Causes are recorded of the infrastructure's failures alone.", ""
    if share >= 1:
        return "", ""
    return (
        "",
        f" Of {1 - share:.1%} of the failures no cause of the study's kinds is known; its table is of a part, too.",
    )


def _study(claim: Claim, cluster: str) -> float | str:
    """Return the study's number if the cluster is the study's, else all its numbers in words."""
    if isinstance(claim.study, str):
        return claim.study
    if cluster in claim.study:
        return claim.study[cluster]
    return ", ".join(
        f"{_formatted(number, claim.unit)} ({name.capitalize()})"
        for name, number in claim.study.items()
    )


def _compared(value: float, claim: Claim) -> str:
    """Return the number of a claim in words; a ratio as a comparison."""
    if claim.ratio == "shorter" and 0 < value < 1:
        return f"{_figure(1 / value)} times longer than"
    if claim.ratio == "shorter":
        return f"{_figure(value)} times shorter than"
    if claim.ratio == "longer" and value < 1:
        return f"{1 - value:.0%} less than"
    if claim.ratio == "longer" and value < 2:
        return f"{value - 1:.0%} longer than"
    if claim.ratio == "longer":
        return f"{_figure(value)} times as long as"
    return _formatted(value, claim.unit)


def _formatted(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    if unit == "s":
        return words.duration(value).replace(words.NBSP, " ")
    return f"{_figure(value)}{' ' if unit not in ('', '%') else ''}{unit}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _times_shorter(cluster_numbers: ClusterNumbers) -> float | None:
    """Divide the shortest median of the compared (else the published) traces by this median."""
    measured = cluster_numbers.get("gpu_job.times_shorter_least")
    median_s = cluster_numbers.get("gpu_job.median_duration_s")
    if measured is not None or not median_s:
        return measured
    return min(PRIOR_MEDIANS_S.values()) / median_s


def _against_greatest(found: dict[str, float], kind: str) -> float | None:
    """Divide the number of one type by the greatest of the others; None without one of them."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(*others, 1e-12)


def _against_least(found: dict[str, float], kind: str) -> float | None:
    """Divide the number of one type by the least of the others; None without one of them."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(min(others), 1e-12)


def _evaluation_wait(cluster_numbers: ClusterNumbers) -> float | None:
    """Divide evaluation's median queue time by the longest of the other types.

    Means replace medians if all medians are 0.
    """
    medians = cluster_numbers.by_type("median_queue_s", least_jobs=LEAST_JOBS)
    found = (
        medians
        if any(medians.values())
        else cluster_numbers.by_type("mean_queue_s", least_jobs=LEAST_JOBS)
    )
    return _against_greatest(found, "evaluation")


def _least_demand(cluster_numbers: ClusterNumbers) -> float | None:
    """Divide the least median GPUs of the other types by evaluation's."""
    share = _against_least(
        cluster_numbers.by_type("median_gpu_num", least_jobs=LEAST_JOBS), "evaluation"
    )
    return 1 / share if share else None


MEASURES: Final[Mapping[str, Callable[[ClusterNumbers], float | None]]] = {
    "times_shorter": _times_shorter,
    "evaluation_lead_in_jobs": lambda cluster_numbers: _against_greatest(
        cluster_numbers.by_type("share_of_jobs"), "evaluation"
    ),
    "pretraining_lead_in_gpu_time": lambda cluster_numbers: _against_greatest(
        cluster_numbers.by_type("share_of_gpu_time"), "pretrain"
    ),
    "pretraining_ratio": lambda cluster_numbers: _against_least(
        cluster_numbers.by_type("median_duration_s", least_jobs=LEAST_JOBS), "pretrain"
    ),
    "evaluation_wait": _evaluation_wait,
    "least_demand": _least_demand,
}
"""Comparisons between types and traces, by their name in `findings.toml`."""
