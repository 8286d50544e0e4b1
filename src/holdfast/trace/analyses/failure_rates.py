"""Analyze how often jobs fail by size: failure rate, time to failure, share that completes.

If each of N GPUs fails at the same constant rate, the mean time to the first failure falls as 1/N,
which is the line in the figures. Failures of users' scripts do not depend on the size of a job.
Infrastructure failures are therefore also shown by themselves; these are reasons of the category
Infrastructure and the state NODE_FAIL. Kokolis et al. study the same scaling in "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv 2410.21680,
abstract).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.trace.analyses.measured import sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, role, size_label, size_of, slug
from holdfast.trace.causes import causes_of
from holdfast.trace.charts import Axis, Figure, Lines, Series
from holdfast.trace.errors import LeftOut
from holdfast.trace.intervals import poisson_interval, wilson_interval
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

CONFIDENCE = 0.95
MOSTLY_UNKNOWN = 0.5
"""If more than this share of failures has no cause, counts by cause are misleadingly small."""
KINDS = ("all", "infrastructure")
SIZE = Axis(label="GPUs of the job", scale="log2")
SECTION = "Failures and what they cost"


@dataclass(frozen=True, kw_only=True)
class SizeCounts:
    """Count a cluster's GPU jobs in the power-of-two size buckets of `selection.size_of`.

    All arrays have the shape (buckets,).
    """

    gpus: Values
    """Upper end of each bucket."""
    ran: Values
    """Number of jobs that ran and ended, in any final state."""
    completed: Values
    gpu_time_h: Values
    run_time_h: Values
    """Sum of the jobs' run times, in hours."""
    failures: dict[str, Values]
    """Number of failures, for each kind in `KINDS`."""
    unknown_share: float
    """Share of failures without a recorded cause, 0 to 1."""


def buckets(gpu_num: npt.ArrayLike) -> Values:
    """Return the size bucket of each number of GPUs; see `selection.size_of`."""
    return np.array([size_of(number) for number in np.asarray(gpu_num, dtype=float).tolist()])


def by_size(trace: "Trace") -> dict[str, SizeCounts]:
    """Count the GPU jobs that ran and ended, by size, for each cluster.

    Raises:
        LeftOut: the trace has no states or no run times, or no GPU job ran and ended.
    """
    trace.require("state", "gpu_num", "run_s")
    table = trace.aggregate("failure_causes").where(is_gpu=True)
    ended = (table["outcome"] != "unfinished") & (table["n_ran"] > 0)
    table = Table({name: column[ended] for name, column in table.columns.items()})
    if not len(table):
        raise LeftOut("Left out: no GPU job of this trace ran and ended.")
    size = buckets(table["gpu_num"])
    failed = table["outcome"] == "failed"
    category = np.array([cause.category for cause in causes_of(table)], dtype=object)
    infrastructure = failed & (category == "Infrastructure")
    found = {}
    for cluster in in_order(trace):
        own = table["cluster"] == cluster
        if not own.any():
            continue
        gpus, which = np.unique(size[own], return_inverse=True)
        ran, run_h = table["n_ran"][own], table["sum_run_s"][own] / 3600
        found[cluster] = SizeCounts(
            gpus=gpus,
            ran=_summed(ran, which),
            completed=_summed(ran * (table["outcome"][own] == "completed"), which),
            gpu_time_h=_summed(run_h * table["gpu_num"][own], which),
            run_time_h=_summed(run_h, which),
            failures={
                "all": _summed(ran * failed[own], which),
                "infrastructure": _summed(ran * infrastructure[own], which),
            },
            unknown_share=float(
                ran[failed[own] & (category[own] == "Unknown")].sum()
                / max(ran[failed[own]].sum(), 1)
            ),
        )
    return found


def _summed(values: npt.NDArray[Any], bucket: npt.NDArray[np.intp]) -> Values:
    return np.bincount(bucket, weights=values.astype(float)).astype(float)


def caveat(found: Mapping[str, SizeCounts]) -> str:
    """Return a caveat for the caption if most failures have no recorded cause, else ""."""
    unknown = {
        cluster: jobs.unknown_share
        for cluster, jobs in found.items()
        if jobs.unknown_share > MOSTLY_UNKNOWN
    }
    if not unknown:
        return ""
    shares = ", ".join(f"{share:.1%} in {cluster}" for cluster, share in unknown.items())
    return (
        f" Most failures have no recorded cause ({shares}), so too few are counted as the "
        "infrastructure's."
    )


def failure_rate_by_size(trace: "Trace", *, confidence: float = CONFIDENCE) -> Result:
    """Chart failures per 1,000 GPU-hours by job size, with exact Poisson intervals.

    The table also has failures per 1,000 node-days. Node-days are GPU-hours divided by 24 times the
    cluster's GPUs per node, or NaN if that number is unknown.

    Args:
        trace: a trace with states, sizes and run times.
        confidence: confidence level of the intervals, 0 to 1.

    Raises:
        LeftOut: the data are missing, as in `by_size`.
    """
    found = by_size(trace)
    rows, series, numbers, captions = [], [], {}, {}
    for cluster, jobs in found.items():
        gpus_per_node = trace.clusters[cluster].gpus_per_node
        node_days_per_gpu_hour = 1 / (24 * gpus_per_node) if gpus_per_node else np.nan
        for kind in KINDS:
            events = jobs.failures[kind]
            if kind == "infrastructure" and not events.any():
                continue
            low, high = poisson_interval(events, confidence=confidence)
            # The GPU time is 0 if all jobs of a size ended when they began.
            with np.errstate(divide="ignore", invalid="ignore"):
                rate, low, high = (1000 * count / jobs.gpu_time_h for count in (events, low, high))
                pooled = 1000 * events.sum() / jobs.gpu_time_h.sum()
            per_node = rate / node_days_per_gpu_hour
            rows += [
                (cluster, kind, *row)
                for row in zip(
                    jobs.gpus, events, jobs.gpu_time_h, rate, low, high, per_node, strict=True
                )
            ]
            some = events > 0
            series.append(
                Series(
                    label=f"{cluster}, {kind} (n = {events.sum():,.0f})",
                    x=jobs.gpus[some],
                    y=rate[some],
                    low=low[some],
                    high=high[some],
                    style="points",
                    role=role(trace, cluster),
                )
            )
            numbers[f"{slug(cluster)}.{kind}.failures_per_1000_gpu_h"] = pooled
            numbers[f"{slug(cluster)}.{kind}.failures_per_1000_node_days"] = (
                pooled / node_days_per_gpu_hour
            )
        captions[cluster] = ", ".join(
            f"{numbers[f'{slug(cluster)}.{kind}.failures_per_1000_gpu_h']:.3g} "
            f"{'failures' if kind == 'all' else 'infrastructure failures'} per 1,000 GPU-hours"
            for kind in KINDS
            if f"{slug(cluster)}.{kind}.failures_per_1000_gpu_h" in numbers
        )
    chart = Lines(
        title="Failure rate by job size",
        x=SIZE,
        y=Axis(label="Failures per 1,000 GPU-hours", scale="log"),
        series=series,
    )
    columns = (
        "cluster",
        "failures",
        "gpus",
        "number",
        "gpu_time_h",
        "per_1000_gpu_h",
        "low",
        "high",
        "per_1000_node_days",
    )
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=[chart], columns=1),
        caption=(
            f"{sentences(captions)} Intervals are exact Poisson at {confidence:.0%}.{caveat(found)}"
        ),
        numbers=numbers,
    )


def time_to_failure_by_size(
    trace: "Trace", *, confidence: float = 0.9, fit_least_gpus: float = 1.0
) -> Result:
    """Chart the mean time to failure (MTTF) by job size, with gamma intervals and the 1/N line.

    The MTTF is the run time of all jobs of a size divided by their failures. The line assumes that
    each GPU fails at a constant rate. Its height is the GPU-hours of all jobs of at least
    `fit_least_gpus` GPUs, divided by their failures and by N.

    Args:
        trace: a trace with states, sizes and run times.
        confidence: confidence level of the intervals, 0 to 1.
        fit_least_gpus: the line is fitted to jobs of at least this number of GPUs.

    Raises:
        LeftOut: the data are missing, as in `by_size`, or nothing failed.
    """
    found = by_size(trace)
    rows, series, numbers = [], [], {}
    captions: dict[str, str] = {}
    for cluster, jobs in found.items():
        for kind in KINDS:
            events = jobs.failures[kind]
            if not events.any():
                continue
            low, high = poisson_interval(events, confidence=confidence)
            with np.errstate(divide="ignore"):
                mttf_h, least_h, most_h = (jobs.run_time_h / count for count in (events, high, low))
            fitted = jobs.gpus >= fit_least_gpus
            with np.errstate(divide="ignore", invalid="ignore"):
                mttf_of_gpu_h = jobs.gpu_time_h[fitted].sum() / events[fitted].sum()
            line_h = mttf_of_gpu_h / jobs.gpus
            rows += [
                (cluster, kind, *row)
                for row in zip(
                    jobs.gpus, events, jobs.run_time_h, mttf_h, least_h, most_h, line_h, strict=True
                )
            ]
            numbers[f"{slug(cluster)}.{kind}.gpu_mttf_h"] = float(mttf_of_gpu_h)
            for gpus, hours in zip(jobs.gpus, mttf_h, strict=True):
                numbers[f"{slug(cluster)}.{kind}.mttf_h.{gpus:g}_gpus"] = float(hours)
            some = events > 0
            series += [
                Series(
                    label=f"{cluster}, {kind} (n = {events.sum():,.0f})",
                    x=jobs.gpus[some],
                    y=mttf_h[some],
                    low=least_h[some],
                    high=most_h[some],
                    style="points",
                ),
                Series(label=f"{cluster}, {kind}: 1/N", x=jobs.gpus, y=line_h, style="dashed"),
            ]
        largest = jobs.gpus[-1]
        words = [
            f"{numbers[f'{slug(cluster)}.{kind}.gpu_mttf_h']:,.0f} GPU-hours to a failure "
            f"({kind}), so "
            f"{numbers[f'{slug(cluster)}.{kind}.gpu_mttf_h'] / largest:,.3g} h at {largest:g} GPUs "
            "if the rate of "
            "a GPU were constant"
            for kind in KINDS
            if f"{slug(cluster)}.{kind}.gpu_mttf_h" in numbers
        ]
        captions |= {cluster: ", ".join(words)} if words else {}
    if not rows:
        raise LeftOut("Left out: no GPU job of this trace failed.")
    chart = Lines(
        title="Mean time to failure by job size",
        x=SIZE,
        y=Axis(label="Mean time to failure (h)", scale="log"),
        series=series,
    )
    columns = (
        "cluster",
        "failures",
        "gpus",
        "number",
        "run_time_h",
        "mttf_h",
        "low_h",
        "high_h",
        "constant_rate_h",
    )
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=[chart], columns=1),
        caption=(
            f"{sentences(captions)} Intervals are exact (gamma) at {confidence:.0%}.{caveat(found)}"
        ),
        numbers=numbers,
    )


def completion_by_size(trace: "Trace", *, confidence: float = CONFIDENCE) -> Result:
    """Chart the share of jobs that complete, by job size, with Wilson intervals.

    Args:
        trace: a trace with states, sizes and run times.
        confidence: confidence level of the intervals, 0 to 1.

    Raises:
        LeftOut: the data are missing, as in `by_size`.
    """
    rows, series, numbers, captions = [], [], {}, {}
    for cluster, jobs in by_size(trace).items():
        share = jobs.completed / jobs.ran
        low, high = wilson_interval(jobs.completed, jobs.ran, confidence=confidence)
        rows += [
            (cluster, *row)
            for row in zip(jobs.gpus, jobs.ran, jobs.completed, share, low, high, strict=True)
        ]
        series.append(
            Series(
                label=f"{cluster} (n = {jobs.ran.sum():,.0f})",
                x=jobs.gpus,
                y=share,
                low=low,
                high=high,
                style="points",
                role=role(trace, cluster),
            )
        )
        for gpus, value in zip(jobs.gpus, share, strict=True):
            numbers[f"{slug(cluster)}.completed.share.{gpus:g}_gpus"] = float(value)
        captions[cluster] = (
            f"{share[0]:.1%} of the jobs of {size_label(jobs.gpus[0])} and {share[-1]:.1%} of "
            "those of "
            f"{size_label(jobs.gpus[-1])} GPUs complete"
        )
    chart = Lines(
        title="Completion by job size",
        x=SIZE,
        y=Axis(label="share of jobs that complete", low=0.0, high=1.0),
        series=series,
    )
    return Result(
        table=Table.of_rows(
            ("cluster", "gpus", "number", "completed", "share", "low", "high"), rows
        ),
        chart=Figure(panels=[chart], columns=1),
        caption=f"{sentences(captions)} Wilson intervals at {confidence:.0%}.",
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="failure_rate_by_size",
        section=SECTION,
        title="Failure rate by job size",
        run=failure_rate_by_size,
    ),
    Analysis(
        name="time_to_failure_by_size",
        section=SECTION,
        title="Mean time to failure by job size",
        run=time_to_failure_by_size,
    ),
    Analysis(
        name="completion_by_size",
        section=SECTION,
        title="Completion by job size",
        run=completion_by_size,
    ),
)
