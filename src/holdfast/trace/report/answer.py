"""The sentence on top and the key figures below it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core import words
from holdfast.trace.analyses.selection import slug
from holdfast.trace.report.model import Read, Report

_YEAR_S = 365.25 * 86400


@dataclass(frozen=True)
class KeyFigure:
    """A number that sums up a cluster."""

    name: str
    value: str
    note: str = ""


def answer(report: Report) -> str:
    """Where the GPU time of each cluster went, in a sentence."""
    numbers = report.numbers
    said = [_sentence(read, numbers) for read in report.clusters if not read.compared]
    return " ".join(said) or "No job was read."


def key_figures(read: Read, numbers: Mapping[str, float]) -> list[KeyFigure]:
    """Four to six numbers of a cluster; those the trace cannot tell are not there.

    Args:
        read: what was read of the cluster.
        numbers: those of all analyses; `comparison_table` gives most that are asked for here.
    """
    key = slug(read.cluster.name)

    def known(name: str) -> float | None:
        value = numbers.get(f"{key}.{name}", math.nan)
        return value if math.isfinite(value) else None

    found = [
        KeyFigure("GPU jobs", f"{read.gpu_jobs:,}", f"of {words.plainly(read.jobs, 'job')}"),
        KeyFigure("GPU time", *_gpu_time(read.gpu_time_s)),
    ]
    if (median_s := known("med_run_time_gpu_s")) is not None:
        mean_s = known("avg_run_time_gpu_s")
        found.append(
            KeyFigure("Median GPU job", words.duration(median_s), f"mean {words.duration(mean_s)}")
        )
    if (median_s := known("med_queue_time_gpu_s")) is not None:
        mean_s = known("avg_queue_time_gpu_s")
        found.append(
            KeyFigure("Median wait", words.duration(median_s), f"mean {words.duration(mean_s)}")
        )
    if (gpus := known("avg_gpu_num")) is not None:
        largest = known("max_gpu_num")
        found.append(
            KeyFigure("GPUs a job", f"{gpus:.3g}", f"largest {largest:,.0f}" if largest else "mean")
        )
    if (jobs := known("fail_rate_gpu")) is not None:
        of_time = known("fail_rate_gpu_time")
        note = "" if of_time is None else f"{words.percent(of_time)} of GPU time"
        found.append(KeyFigure("Failed", words.percent(jobs), note or "of GPU jobs"))
    return found


def _sentence(read: Read, numbers: Mapping[str, float]) -> str:
    key = slug(read.cluster.name)
    median_s = numbers.get(f"{key}.med_run_time_gpu_s", math.nan)
    completed = numbers.get(f"{key}.complete_rate_gpu_time", math.nan)
    jobs = words.plainly(read.gpu_jobs, "job")
    subject = f"{read.cluster.name} gave {_gpu_years(read.gpu_time_s)} of GPU time to {jobs}"
    parts = []
    if math.isfinite(median_s):
        parts.append(f"half of them ended within {words.duration(median_s)}")
    if math.isfinite(completed):
        parts.append(f"{words.percent(completed)} of that time went to jobs that completed")
    return f"{subject}; {', and '.join(parts)}." if parts else f"{subject}."


def _gpu_time(gpu_time_s: float) -> tuple[str, str]:
    """In years where it is many, and in hours."""
    hours = f"{gpu_time_s / 3600:,.0f}"
    years = gpu_time_s / _YEAR_S
    if years < 1:
        return f"{hours}{words.NBSP}h", "of one GPU"
    return (
        f"{years:,.3g}{words.NBSP}years" if years < 1000 else f"{years:,.0f}{words.NBSP}years",
        f"{hours} GPU h",
    )


def _gpu_years(gpu_time_s: float) -> str:
    years = gpu_time_s / _YEAR_S
    if years < 0.1:
        return f"{gpu_time_s / 3600:,.3g}{words.NBSP}GPU-hours"
    return (
        f"{years:,.0f}{words.NBSP}GPU-years"
        if years >= 100
        else f"{years:,.2g}{words.NBSP}GPU-years"
    )
