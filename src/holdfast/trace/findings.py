"""Compare the study's headline findings with a trace: both numbers, and whether the finding holds.

Each claim of the study is an entry in `findings.toml`: which named number of the analyses to use,
the study's number, and the bounds within which the finding holds. This module evaluates the claims,
and computes the comparisons that need several numbers.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.core import words
from holdfast.trace.analyses.failures import ALL, ALL_CLUSTERS
from holdfast.trace.analyses.selection import slug
from holdfast.trace.schema import TYPES

Numbers = Mapping[str, float]

CLAIMS_FILE: Final = Path(__file__).with_suffix(".toml")
PRIOR_MEDIANS_S: Final = {"Philly": 874.0, "Helios": 206.0, "PAI": 481.0}
"""Median GPU job durations of the traces to which the study compares its own (Table 2), in s."""
MIN_JOBS: Final = 30
"""The fewest jobs for a verdict. It also is the fewest jobs of a type whose median is compared."""
MIN_CAUSES: Final = 100
"""The fewest failures with a recorded cause for which shares of causes are compared.

With 100 failures, two standard errors of a share of 11% are 6 percentage points.
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of the study, evaluated for one cluster or for all clusters together."""

    id: str
    """`CLAIM.CLUSTER`, where both parts are slugs."""
    cluster: str
    sentence: str
    """The result for this trace as a sentence with its number."""
    value: float | None
    """The number for this trace; None if it cannot be computed."""
    unit: str
    """Unit of `value`, and of `study` if that is a number; a `share` is from 0 to 1."""
    study: float | str
    """The study's number for this cluster, or a text if the study has no single number."""
    holds: bool | None
    """True if the finding holds for this trace; None if this trace cannot answer."""
    why: str
    """The bounds as text, or the reason why this trace cannot answer."""
    source: str
    """Place of the finding in the study."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the study; the head of `findings.toml` describes the fields."""

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
    """Read all claims, in the order of the report."""
    return tuple(Claim(**claim) for claim in tomllib.loads(CLAIMS_FILE.read_text("utf-8"))["claim"])


def findings(numbers: Numbers, clusters: Sequence[str]) -> tuple[Finding, ...]:
    """Evaluate every claim for every cluster.

    If the trace has several clusters, a claim that the study makes for its clusters together is
    evaluated for all clusters together.

    Args:
        numbers: the named numbers of all analyses. If a number is missing, its finding has no
            answer.
        clusters: names of the trace's clusters, without those that serve only for comparison.
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
    """The named numbers of one cluster."""

    numbers: Numbers
    cluster: str

    def get(self, key: str) -> float | None:
        """Return a number by its key without the cluster; None if the number is missing or NaN."""
        number = self.numbers.get(f"{slug(self.cluster)}.{key}")
        return None if number is None or math.isnan(number) else float(number)

    def by_type(self, key: str, *, least_jobs: int = 0) -> dict[str, float]:
        """Return a number for each job type.

        Types with fewer than `least_jobs` jobs are left out. Types whose number of jobs is unknown
        are included.
        """
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
    name = ALL_CLUSTERS if cluster_numbers.cluster == ALL else cluster_numbers.cluster
    holds: bool | None = None
    doubt, caveat = _of_causes(cluster_numbers) if claim.by_cause else ("", "")
    jobs = cluster_numbers.get("gpu_job_num")
    if value is None or decisive is None:
        why = f"The trace has no {claim.needs}."
    elif jobs is not None and jobs < MIN_JOBS:
        few = words.plainly(round(jobs), "GPU job")
        why = f"The trace has {few}; from {MIN_JOBS} on a comparison is possible."
    elif doubt:
        why = doubt
    else:
        why = f"{claim.because}{caveat}"
        if math.isfinite(claim.low) or math.isfinite(claim.high):
            holds = claim.low <= decisive <= claim.high
    return Finding(
        id=f"{claim.id}.{slug(cluster_numbers.cluster)}",
        cluster=cluster_numbers.cluster,
        sentence=f"{name}: cannot be determined."
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
    """Return why failure causes cannot be judged, and a caveat if they can.

    Returns:
        Two texts, of which at least one is empty.
    """
    recorded, infrastructure = (
        cluster_numbers.get(f"failures.recorded.{key}") or 0.0
        for key in ("number", "infrastructure.number")
    )
    share = cluster_numbers.get("failures.recorded.share_of_failures") or 0.0
    if recorded < MIN_CAUSES:
        return (
            f"Only {recorded:,.0f} failures have a recorded cause; from {MIN_CAUSES} on it can be determined.",
            "",
        )
    if infrastructure == recorded:
        # The scheduler identifies failures of nodes and gives no cause for other failures.
        return "Causes are recorded of the infrastructure's failures alone.", ""
    if share >= 1:
        return "", ""
    return (
        "",
        f" {1 - share:.1%} of the failures have no cause of the study's kinds; its table is partial, too.",
    )


def _study(claim: Claim, cluster: str) -> float | str:
    """Return the study's number for a cluster of the study.

    For any other cluster, return all the study's numbers as text.
    """
    if isinstance(claim.study, str):
        return claim.study
    if cluster in claim.study:
        return claim.study[cluster]
    return ", ".join(
        f"{_formatted(number, claim.unit)} ({name.capitalize()})"
        for name, number in claim.study.items()
    )


def _compared(value: float, claim: Claim) -> str:
    """Return the value of a claim as text; a ratio is phrased as a comparison."""
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
    """Divide the shortest median duration of the other traces by this trace's median duration.

    The other traces are those read for comparison, or else the published medians.
    """
    measured = cluster_numbers.get("gpu_job.times_shorter_least")
    median_s = cluster_numbers.get("gpu_job.median_duration_s")
    if measured is not None or not median_s:
        return measured
    return min(PRIOR_MEDIANS_S.values()) / median_s


def _against_greatest(found: dict[str, float], kind: str) -> float | None:
    """Divide one type's number by the largest of the others; None if either is missing."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(*others, 1e-12)


def _ratio_to_smallest(found: dict[str, float], kind: str) -> float | None:
    """Divide one type's number by the smallest of the others; None if either is missing."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(min(others), 1e-12)


def _evaluation_wait(cluster_numbers: ClusterNumbers) -> float | None:
    """Divide the median queue time of evaluation jobs by the longest median of the other types.

    If all medians are 0, means are used.
    """
    medians = cluster_numbers.by_type("median_queue_s", least_jobs=MIN_JOBS)
    found = (
        medians
        if any(medians.values())
        else cluster_numbers.by_type("mean_queue_s", least_jobs=MIN_JOBS)
    )
    return _against_greatest(found, "evaluation")


def _least_demand(cluster_numbers: ClusterNumbers) -> float | None:
    """Divide the other types' smallest median number of GPUs by evaluation's median."""
    share = _ratio_to_smallest(
        cluster_numbers.by_type("median_gpu_num", least_jobs=MIN_JOBS), "evaluation"
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
    "pretraining_ratio": lambda cluster_numbers: _ratio_to_smallest(
        cluster_numbers.by_type("median_duration_s", least_jobs=MIN_JOBS), "pretrain"
    ),
    "evaluation_wait": _evaluation_wait,
    "least_demand": _least_demand,
}
"""The comparisons between types and between traces, by their name in `findings.toml`."""
