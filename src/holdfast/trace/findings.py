"""The study's headline findings, asked of a trace: its number, the study's, and whether the finding holds here.

The claims are data, `findings.toml`: what is asked of which named number of the analyses, what the study has, and from
where to where the answer holds. Here is how they are asked, and the comparisons that no single number answers.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.trace.analyses.failures import ALL, ALL_SAID
from holdfast.trace.analyses.selection import slug
from holdfast.trace.schema import TYPES

Numbers = Mapping[str, float]

CLAIMS_FILE: Final = Path(__file__).with_suffix(".toml")
PRIOR_MEDIANS_S: Final = {"Philly": 874.0, "Helios": 206.0, "PAI": 481.0}
"""Median GPU job durations of the traces that the study compares with (Table 2)."""
LEAST_JOBS: Final = 30
"""A type of fewer jobs has no median worth comparing."""
LEAST_CAUSES: Final = 100
"""Of fewer failures with a cause, shares say little: at 11%, 6 points are two standard errors of 100."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of the study, asked of one cluster, or of all together."""

    id: str
    """`CLAIM.CLUSTER`, a slug each."""
    cluster: str
    sentence: str
    """What was found here, with its number."""
    value: float | None
    """None where it cannot be told."""
    unit: str
    """Of `value` and of a numeric `study`; `share` is 0 to 1."""
    study: float | str
    """The study's number for this very cluster, or its words."""
    holds: bool | None
    """None: it cannot be told."""
    why: str
    """The bounds in words, or why it cannot be told."""
    source: str
    """Where the study has it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding of the study, in the form in which it is asked; see the head of `findings.toml`."""

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
    low: float = -math.inf
    high: float = math.inf
    pooled: bool = False
    by_cause: bool = False


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim, in the order of the report."""
    return tuple(Claim(**claim) for claim in tomllib.loads(CLAIMS_FILE.read_text("utf-8"))["claim"])


def findings(numbers: Numbers, clusters: Sequence[str]) -> tuple[Finding, ...]:
    """Every claim of the study asked of every cluster; of several together where the study pools its own.

    Args:
        numbers: the named numbers of all analyses; what is missing makes a finding that cannot be told.
        clusters: names of those the trace is about, not of those it is compared with.
    """
    several = len(clusters) > 1
    by_cluster = [
        _asked(claim, Asked(numbers, cluster))
        for cluster in clusters
        for claim in claims()
        if not (several and claim.pooled)
    ]
    pooled = [_asked(claim, Asked(numbers, ALL)) for claim in claims() if several and claim.pooled]
    return (*by_cluster, *pooled)


@dataclass(frozen=True)
class Asked:
    """The numbers of one cluster."""

    numbers: Numbers
    cluster: str

    def get(self, key: str) -> float | None:
        """A number by its key without the cluster; None where it is missing or NaN."""
        number = self.numbers.get(f"{slug(self.cluster)}.{key}")
        return None if number is None or math.isnan(number) else float(number)

    def by_type(self, key: str, *, least_jobs: int = 0) -> dict[str, float]:
        """A number of each type that has it and at least so many jobs, or an unknown number of them."""
        found = {slug(name): self.get(f"{slug(name)}.{key}") for name in TYPES}
        jobs = {name: self.get(f"{name}.n") for name in found}
        return {
            name: value
            for name, value in found.items()
            if value is not None and ((of_it := jobs[name]) is None or of_it >= least_jobs)
        }


def _asked(claim: Claim, asked: Asked) -> Finding:
    value = asked.get(claim.number) if claim.number else MEASURES[claim.measure](asked)
    decisive = MEASURES[claim.decides](asked) if claim.decides else value
    name = ALL_SAID if asked.cluster == ALL else asked.cluster
    holds: bool | None = None
    doubt, caveat = _of_causes(asked) if claim.by_cause else ("", "")
    if value is None or decisive is None:
        why = f"The trace has no {claim.needs}."
    elif doubt:
        why = doubt
    else:
        why = f"{claim.because}{caveat}"
        if math.isfinite(claim.low) or math.isfinite(claim.high):
            holds = claim.low <= decisive <= claim.high
    return Finding(
        id=f"{claim.id}.{slug(asked.cluster)}",
        cluster=asked.cluster,
        sentence=f"{name}: cannot be told."
        if value is None
        else claim.asks.format(cluster=name, value=_said(value, claim.unit)),
        value=value,
        unit=claim.unit,
        study=_study(claim, slug(asked.cluster)),
        holds=holds,
        why=why,
        source=claim.source,
    )


def _of_causes(asked: Asked) -> tuple[str, str]:
    """Why causes of failures cannot be judged, empty where they can; and what must be said where they are."""
    recorded, infrastructure = (
        asked.get(f"failures.recorded.{key}") or 0.0 for key in ("number", "infrastructure.number")
    )
    share = asked.get("failures.recorded.share_of_failures") or 0.0
    if recorded < LEAST_CAUSES:
        return (
            f"Only {recorded:,.0f} failures have a recorded cause; from {LEAST_CAUSES} on it can be told.",
            "",
        )
    if infrastructure == recorded:
        # A scheduler tells a node's failure from others, and nothing of those.
        return "Causes are recorded of the infrastructure's failures alone.", ""
    if share >= 1:
        return "", ""
    return (
        "",
        f" Of {1 - share:.1%} of the failures no cause of the study's kinds is known; its table is of a part, too.",
    )


def _study(claim: Claim, cluster: str) -> float | str:
    """The study's number where the cluster is one of its own, else all that it says."""
    if isinstance(claim.study, str):
        return claim.study
    if cluster in claim.study:
        return claim.study[cluster]
    return ", ".join(
        f"{_said(number, claim.unit)} ({name.capitalize()})" for name, number in claim.study.items()
    )


def _said(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.3g}{' ' if unit not in ('', '%') else ''}{unit}"


def _times_shorter(asked: Asked) -> float | None:
    """How many times shorter the median is than the shortest prior one: of traces compared, else as published."""
    measured = asked.get("gpu_job.times_shorter_least")
    median_s = asked.get("gpu_job.median_duration_s")
    if measured is not None or not median_s:
        return measured
    return min(PRIOR_MEDIANS_S.values()) / median_s


def _against_greatest(found: dict[str, float], kind: str) -> float | None:
    """The number of one type over the greatest of the others'; None without one of them."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(*others, 1e-12)


def _against_least(found: dict[str, float], kind: str) -> float | None:
    """The number of one type over the least of the others'."""
    own, others = found.get(kind), [value for name, value in found.items() if name != kind]
    return None if own is None or not others else own / max(min(others), 1e-12)


def _evaluation_wait(asked: Asked) -> float | None:
    """Evaluation's median queue time over the longest of the others'; the means where the medians are all 0."""
    medians = asked.by_type("median_queue_s", least_jobs=LEAST_JOBS)
    found = (
        medians if any(medians.values()) else asked.by_type("mean_queue_s", least_jobs=LEAST_JOBS)
    )
    return _against_greatest(found, "evaluation")


def _least_demand(asked: Asked) -> float | None:
    """The least median GPUs of the other types over evaluation's."""
    share = _against_least(asked.by_type("median_gpu_num", least_jobs=LEAST_JOBS), "evaluation")
    return 1 / share if share else None


MEASURES: Final[Mapping[str, Callable[[Asked], float | None]]] = {
    "times_shorter": _times_shorter,
    "evaluation_lead_in_jobs": lambda asked: _against_greatest(
        asked.by_type("share_of_jobs"), "evaluation"
    ),
    "pretraining_lead_in_gpu_time": lambda asked: _against_greatest(
        asked.by_type("share_of_gpu_time"), "pretrain"
    ),
    "pretraining_ratio": lambda asked: _against_least(
        asked.by_type("median_duration_s", least_jobs=LEAST_JOBS), "pretrain"
    ),
    "evaluation_wait": _evaluation_wait,
    "least_demand": _least_demand,
}
"""Comparisons between types and traces, by the name that `findings.toml` calls them."""
