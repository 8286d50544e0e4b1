"""The study's headline findings, asked of a trace: its number, the study's, and whether the finding holds here.

Claims are data: what is asked, from which named numbers of the analyses, what the study has, and from where to where
the answer holds. A claim about a comparison (the longest, the most) holds by its own terms; bounds about an amount are
Holdfast's reading of the study's words and stand beside each claim. Thresholds are wide: a finding that holds is of
the study's kind, not of its exact size.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.trace.analyses.selection import slug
from holdfast.trace.schema import TYPES

Numbers = Mapping[str, float]

PRIOR_MEDIANS_S: Final = {"Philly": 874.0, "Helios": 206.0, "PAI": 481.0}
"""Median GPU job durations of the traces that the study compares with (Table 2)."""
LEAST_JOBS = 30
"""A type of fewer jobs has no median worth comparing."""
MOSTLY_UNKNOWN = 0.5
"""Above this share of failures without a cause, nothing can be said of causes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of the study, asked of one cluster."""

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
    source: str
    """Where the study has it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding of the study, in the form in which it is asked."""

    id: str
    asks: str
    """The sentence, `{cluster}` and `{value}` to be filled in."""
    value: Callable[["Asked"], float | None]
    unit: str
    study: Mapping[str, float] | str
    """Its number by slug of cluster, or its words."""
    source: str
    needs: str
    """What a trace must have: `types of workload`."""
    low: float = -math.inf
    high: float = math.inf
    """The finding holds from low to high, both included, of `decides`."""
    decides: Callable[["Asked"], float | None] | None = None
    """What is held against the bounds; the value unless given."""
    because: str
    """The bounds in words."""
    doubt: Callable[["Asked"], str] = lambda _: ""
    """Why the finding cannot be told although there are numbers; empty: it can."""


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
        """A number of each type that has it and at least so many jobs."""
        found = {slug(name): self.get(f"{slug(name)}.{key}") for name in TYPES}
        return {
            name: value
            for name, value in found.items()
            if value is not None and (self.get(f"{name}.n") or math.inf) >= least_jobs
        }


def findings(numbers: Numbers, clusters: Iterable[str]) -> tuple[Finding, ...]:
    """Every claim of the study asked of every cluster.

    Args:
        numbers: the named numbers of all analyses; what is missing makes a finding that cannot be told.
        clusters: names of those the trace is about, not of those it is compared with.
    """
    return tuple(_asked(claim, Asked(numbers, cluster)) for cluster in clusters for claim in CLAIMS)


def _asked(claim: Claim, asked: Asked) -> Finding:
    value = claim.value(asked)
    decisive = claim.decides(asked) if claim.decides and value is not None else value
    doubt = claim.doubt(asked)
    holds: bool | None = None
    if value is None:
        sentence, why = f"{asked.cluster}: cannot be told.", f"The trace has no {claim.needs}."
    else:
        sentence = claim.asks.format(cluster=asked.cluster, value=_said(value, claim.unit))
        why = doubt or claim.because
        if decisive is None:
            why = f"The trace has no {claim.needs}."
        elif not doubt and math.isfinite(claim.high - claim.low) | math.isfinite(claim.low) | math.isfinite(claim.high):
            holds = claim.low <= decisive <= claim.high
    study: float | str
    if isinstance(claim.study, str):
        study = claim.study
    elif slug(asked.cluster) in claim.study:
        study = claim.study[slug(asked.cluster)]
    else:
        study = ", ".join(f"{_said(each, claim.unit)} ({name.capitalize()})" for name, each in claim.study.items())
    return Finding(
        id=f"{claim.id}.{slug(asked.cluster)}",
        cluster=asked.cluster,
        sentence=sentence,
        value=value,
        unit=claim.unit,
        study=study,
        holds=holds,
        why=why,
        source=claim.source,
    )


def _said(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.3g}{' ' if unit not in ('', '%') else ''}{unit}"


def _number(key: str) -> Callable[[Asked], float | None]:
    return lambda asked: asked.get(key)


def _times_shorter(asked: Asked) -> float | None:
    """How many times shorter the median is than the shortest prior one: of traces compared, else as published."""
    measured = asked.get("gpu_job.times_shorter_least")
    median_s = asked.get("gpu_job.median_duration_s")
    if measured is not None or not median_s:
        return measured
    return min(PRIOR_MEDIANS_S.values()) / median_s


def _lead(key: str, kind: str) -> Callable[[Asked], float | None]:
    """How many times the number of one type is the greatest of the others'."""

    def lead(asked: Asked) -> float | None:
        found = asked.by_type(key)
        own, others = found.pop(kind, None), max(found.values(), default=None)
        return None if own is None or others is None else own / max(others, 1e-12)

    return lead


def _longest_wait(asked: Asked) -> float | None:
    """Evaluation's median queue time over the longest of the others'; the means where the medians are all 0."""
    found = asked.by_type("median_queue_s", least_jobs=LEAST_JOBS)
    if found and not any(found.values()):
        found = asked.by_type("mean_queue_s", least_jobs=LEAST_JOBS)
    own, others = found.pop("evaluation", None), max(found.values(), default=None)
    return None if own is None or others is None else own / max(others, 1e-12)


def _least_demand(asked: Asked) -> float | None:
    """The least median GPUs of the other types over evaluation's."""
    found = asked.by_type("median_gpu_num", least_jobs=LEAST_JOBS)
    own, others = found.pop("evaluation", None), min(found.values(), default=None)
    return None if own is None or others is None else others / max(own, 1e-12)


def _pretrain_ratio(asked: Asked) -> float | None:
    """Pretraining's median duration over the shortest of the other types'."""
    found = asked.by_type("median_duration_s", least_jobs=LEAST_JOBS)
    own, others = found.pop("pretrain", None), min(found.values(), default=None)
    return None if own is None or others is None else own / max(others, 1e-12)


def _unknown_causes(asked: Asked) -> str:
    unknown = asked.get("failures.unknown.share_of_failures") or 0.0
    if unknown <= MOSTLY_UNKNOWN:
        return ""
    return f"Nobody recorded why {unknown:.0%} of the failures failed."


CLAIMS: Final = (
    Claim(
        id="short-jobs",
        asks="{cluster}: the median GPU job runs {value}.",
        value=_number("gpu_job.median_duration_s"),
        unit="s",
        study={"seren": 122.0, "kalos": 124.0},
        source="Fig 2a, Table 2",
        needs="durations of GPU jobs",
        high=300.0,
        because="The study says about 2 minutes; up to 5 count.",
    ),
    Claim(
        id="shorter-than-before",
        asks="{cluster}: the median GPU job is {value} times shorter than that of the shortest prior trace.",
        value=_times_shorter,
        unit="",
        study="1.7 to 7.2 times shorter than Philly, Helios and PAI",
        source="Fig 2a",
        needs="durations of GPU jobs",
        low=1.0,
        because="It must be shorter than in every trace compared with: Philly 874 s, Helios 206 s, PAI 481 s.",
    ),
    Claim(
        id="polarised-utilisation",
        asks="{cluster}: {value} of the samples of GPU_UTIL are 0 or at least 95%.",
        value=_number("gpu_util.polarised_share"),
        unit="share",
        study="polarised at 0 and 100",
        source="Fig 2b",
        needs="telemetry of GPU_UTIL",
        low=0.75,
        because="Three quarters of the samples at the two ends count as polarised.",
    ),
    Claim(
        id="high-median-utilisation",
        asks="{cluster}: the median of GPU_UTIL is {value}.",
        value=_number("gpu_util.median_pct"),
        unit="%",
        study={"seren": 97.0, "kalos": 99.0},
        source="Fig 2b",
        needs="telemetry of GPU_UTIL",
        low=90.0,
        because="The study has 97 and 99%, and 48 and 4% of Philly and PAI; from 90% on counts.",
    ),
    Claim(
        id="one-gpu-jobs-are-most",
        asks="{cluster}: {value} of the GPU jobs ask for at most one GPU.",
        value=_number("gpu_job.share_of_jobs_at_most_1_gpu"),
        unit="share",
        study={"seren": 0.540, "kalos": 0.863},
        source="Fig 3a",
        needs="numbers of GPUs",
        low=0.5,
        because="Most is more than half.",
    ),
    Claim(
        id="one-gpu-jobs-take-little",
        asks="{cluster}: jobs of at most one GPU take {value} of the GPU time.",
        value=_number("gpu_job.share_of_gpu_time_at_most_1_gpu"),
        unit="share",
        study="under 2%",
        source="Fig 3b",
        needs="GPU time by size",
        high=0.02,
        because="The study says under 2%.",
    ),
    Claim(
        id="large-jobs-take-most",
        asks="{cluster}: jobs of at least 256 GPUs take {value} of the GPU time.",
        value=_number("gpu_job.share_of_gpu_time_from_256_gpus"),
        unit="share",
        study={"seren": 0.564, "kalos": 0.9625},
        source="Fig 3b",
        needs="GPU time by size",
        low=0.5,
        because="Most is more than half.",
    ),
    Claim(
        id="evaluation-is-most-jobs",
        asks="{cluster}: evaluation is {value} of the GPU jobs.",
        value=_number("evaluation.share_of_jobs"),
        unit="share",
        study={"seren": 0.649, "kalos": 0.928},
        source="Fig 4",
        needs="types of workload",
        low=1.0,
        decides=_lead("share_of_jobs", "evaluation"),
        because="No other type may have more jobs.",
    ),
    Claim(
        id="pretraining-takes-most-time",
        asks="{cluster}: pretraining takes {value} of the GPU time.",
        value=_number("pretrain.share_of_gpu_time"),
        unit="share",
        study={"seren": 0.695, "kalos": 0.955},
        source="Fig 4",
        needs="types of workload",
        low=1.0,
        decides=_lead("share_of_gpu_time", "pretrain"),
        because="No other type may take more GPU time.",
    ),
    Claim(
        id="pretraining-median-is-near",
        asks="{cluster}: pretraining's median duration is {value} times that of the shortest type.",
        value=_pretrain_ratio,
        unit="",
        study="within 10 times",
        source="Fig 6a, 6c",
        needs=f"durations of pretraining and of another type, of at least {LEAST_JOBS} jobs each",
        high=10.0,
        because="The study says within an order of magnitude.",
    ),
    Claim(
        id="evaluation-waits-longest",
        asks="{cluster}: evaluation waits {value} times as long in the median as any other type.",
        value=_longest_wait,
        unit="",
        study="the longest of all types",
        source="Fig 6b, 6d",
        needs=f"queue times of evaluation and of another type, of at least {LEAST_JOBS} jobs each",
        low=1.0,
        because="No other type may wait longer in the median.",
    ),
    Claim(
        id="evaluation-asks-least",
        asks="{cluster}: every other type asks for at least {value} times the GPUs of evaluation in the median.",
        value=_least_demand,
        unit="",
        study="the least of all types",
        source="Fig 5",
        needs=f"GPUs of evaluation and of another type, of at least {LEAST_JOBS} jobs each",
        low=1.0,
        because="No other type may ask for less in the median.",
    ),
    Claim(
        id="few-jobs-are-cancelled",
        asks="{cluster}: {value} of the GPU jobs are cancelled.",
        value=_number("gpu_job.cancelled_share_of_jobs"),
        unit="share",
        study={"seren": 0.075, "kalos": 0.062},
        source="Section 3.3",
        needs="final states",
        high=0.15,
        because="The study has 6 to 8%; up to 15% is few.",
    ),
    Claim(
        id="cancelled-jobs-take-most",
        asks="{cluster}: cancelled jobs take {value} of the GPU time.",
        value=_number("gpu_job.cancelled_share_of_gpu_time"),
        unit="share",
        study={"seren": 0.664, "kalos": 0.607},
        source="Section 3.3",
        needs="final states",
        low=0.5,
        because="The study has over 60%; most is more than half.",
    ),
    Claim(
        id="many-jobs-fail",
        asks="{cluster}: {value} of the GPU jobs fail.",
        value=_number("gpu_job.failed_share_of_jobs"),
        unit="share",
        study={"seren": 0.429, "kalos": 0.397},
        source="Section 3.3",
        needs="final states",
        low=0.3,
        because="The study has about 40%; from 30% on counts.",
    ),
    Claim(
        id="failures-take-little",
        asks="{cluster}: failed jobs take {value} of the GPU time.",
        value=_number("gpu_job.failed_share_of_gpu_time"),
        unit="share",
        study={"seren": 0.124, "kalos": 0.080},
        source="Section 3.3",
        needs="final states",
        high=0.2,
        because="The study has about 10%; up to 20% counts.",
    ),
    Claim(
        id="multiprocessors-half-idle",
        asks="{cluster}: the median of SM_ACTIVE is {value}.",
        value=_number("sm_active.median_pct"),
        unit="%",
        study="about 40% (the released curves: 50% in Seren, 33% in Kalos)",
        source="Fig 7a",
        needs="telemetry of SM_ACTIVE",
        high=60.0,
        because="The study has about 40%, far below GPU_UTIL; up to 60% counts.",
    ),
    Claim(
        id="gpu-memory-is-used",
        asks="{cluster}: GPU memory is more than 75% full in {value} of the samples.",
        value=_number("gpu_memory.over_share"),
        unit="share",
        study="half of Kalos' GPUs",
        source="Fig 7b",
        needs="telemetry of FB_USED, or the memory of its GPUs is not known",
        low=0.45,
        because="The study says half; 45% counts.",
    ),
    Claim(
        id="cpus-are-underused",
        asks="{cluster}: the median CPU utilisation of a node is {value}.",
        value=_number("cpu.median_pct"),
        unit="%",
        study="underused",
        source="Fig 7c",
        needs="telemetry of NODE_CPU_UTILIZATION",
        high=50.0,
        because="Underused is less than half.",
    ),
    Claim(
        id="host-memory-is-underused",
        asks="{cluster}: host memory is more than half full in {value} of the samples.",
        value=_number("host_memory.over_half_share"),
        unit="share",
        study="below 50%",
        source="Fig 7b",
        needs="telemetry of NODE_MEMORY_UTILIZATION",
        high=0.05,
        because="The study has usage below 50%; an exception of 5% of the samples counts.",
    ),
    Claim(
        id="infiniband-is-idle",
        asks="{cluster}: InfiniBand sends nothing to speak of in {value} of the samples.",
        value=_number("ib_send.idle_share"),
        unit="share",
        study="over 60%",
        source="Fig 7d",
        needs="telemetry of NODE_IB_SEND",
        low=0.6,
        because="The study says over 60%; at most 1% of the greatest rate is idle.",
    ),
    Claim(
        id="gpus-idle",
        asks="{cluster}: {value} of the samples are of GPUs that draw no more than an idle one.",
        value=_number("gpu_power.idle_share"),
        unit="share",
        study="about 30%, at 60 W",
        source="Fig 8a",
        needs="telemetry of POWER_USAGE",
        low=0.2,
        because="The study has about 30%; from 20% on counts.",
    ),
    Claim(
        id="gpus-above-tdp",
        asks="{cluster}: {value} of the samples are of GPUs above their rated power.",
        value=_number("gpu_power.over_tdp_share"),
        unit="share",
        study={"seren": 0.221, "kalos": 0.125},
        source="Fig 8a",
        needs="telemetry of POWER_USAGE, or the rated power of its GPUs is not known",
        low=0.1,
        because="The study has 22.1% and 12.5%; from 10% on counts. Seren's released curve has 8.0%.",
    ),
    Claim(
        id="gpu-server-draws-five-times",
        asks="{cluster}: a GPU server draws {value} times what a CPU server draws.",
        value=_number("server_power.gpu_to_cpu"),
        unit="",
        study={"seren": 5.0},
        source="Fig 8b",
        needs="telemetry of the power of GPU servers and CPU servers",
        low=3.0,
        because="The study has 5 times; from 3 on counts.",
    ),
    Claim(
        id="gpus-draw-two-thirds",
        asks="{cluster}: GPUs draw {value} of a GPU server's power.",
        value=_number("server_power.gpu_share"),
        unit="share",
        study={"seren": 2 / 3},
        source="Fig 9",
        needs="telemetry of the power of GPUs and of their servers",
        low=0.5,
        high=0.8,
        because="The study has two thirds; from a half to four fifths counts. Seren's released curves give 46%.",
    ),
    Claim(
        id="memory-is-hotter",
        asks="{cluster}: the memory of GPUs is {value} hotter than their cores in the median.",
        value=_number("memory_hotter_c"),
        unit="°C",
        study="hotter (the released curves: 12 °C in Seren, 11 °C in Kalos)",
        source="Appendix",
        needs="telemetry of GPU_TEMP and MEMORY_TEMP",
        low=1e-9,
        because="The memory must be hotter.",
    ),
    Claim(
        id="infrastructure-failures-are-few",
        asks="{cluster}: {value} of the failures are the infrastructure's.",
        value=_number("failures.infrastructure.share_of_failures"),
        unit="share",
        study="11%",
        source="Table 3",
        needs="final states",
        high=0.25,
        because="The study has 11%; up to 25% is few.",
        doubt=_unknown_causes,
    ),
    Claim(
        id="infrastructure-failures-cost-most",
        asks="{cluster}: infrastructure failures take {value} of the GPU time of failures.",
        value=_number("failures.infrastructure.share_of_gpu_time"),
        unit="share",
        study="82.06%",
        source="Table 3",
        needs="final states",
        low=0.5,
        because="The study has 82%; most is more than half.",
        doubt=_unknown_causes,
    ),
    Claim(
        id="carbon",
        asks="{cluster}: {value} of CO2-equivalent, over all hours with telemetry.",
        value=_number("carbon.t_co2e"),
        unit="t",
        study="321.7 t in one month of Seren (673 MWh)",
        source="Appendix",
        needs="telemetry of power",
        because="An amount to set beside the study's: it neither holds nor fails.",
    ),
)
