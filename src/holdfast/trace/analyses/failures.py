"""Analyze why jobs fail, what the failures cost, and when they occur.

The tables follow the study's Table 3, for any source of failure causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.measured import sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import UNKNOWN, in_order, slug
from holdfast.trace.causes import CATEGORIES, Cause, causes_of
from holdfast.trace.charts import Axis, Bars, Figure, Heatmap
from holdfast.trace.distribution import Distribution
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

ALL = "all"
ALL_CLUSTERS = "All clusters"
"""Name of the row for all clusters together, since Table 3 pools Seren and Kalos."""
NONE_FAILED = "Left out: no job of this trace failed."
STUDIED = ("Infrastructure", "Framework", "Script")
"""The study's categories. Table 3 counts only failures whose cause is in one of them."""

COLUMNS = (
    "cluster",
    "category",
    "reason",
    "number",
    "share_of_failures",
    "mean_gpus",
    "median_gpus",
    "mean_minutes_to_failure",
    "median_minutes_to_failure",
    "gpu_time_h",
    "share_of_failure_gpu_time",
    "mean_minutes_to_restart",
    "median_minutes_to_restart",
    "restarts",
)


@dataclass(frozen=True, kw_only=True)
class _Failures:
    """Hold the failures of one cause."""

    number: float
    gpu_time_s: float
    gpus: Distribution
    run_s: Distribution
    restart_s: Distribution
    """Times to restart, of the failures after which work continued within the limit."""


def failure_table(
    trace: "Trace", *, cpu_jobs: bool = False, restart_within_h: float = 24.0
) -> Result:
    """Tabulate failures by cause: number, job size, time to failure, GPU time and time to restart.

    This is the study's Table 3. Failures without a recorded cause appear as `unknown`, with their
    share. The time to restart is measured for GPU jobs only. It ends when the job's next attempt
    starts, or when the same user's next job with the same name and number of GPUs starts.

    Args:
        trace: a trace with the column `state`.
        cpu_jobs: True to count failed jobs without GPUs too.
        restart_within_h: a restart after more than this number of hours does not count.

    Raises:
        LeftOut: the trace has no states, or no job failed.
    """
    found = _by_cause(trace, cpu_jobs=cpu_jobs, restart_within_s=3600 * restart_within_h)
    if not found:
        raise LeftOut(NONE_FAILED)
    rows: list[tuple[Any, ...]] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for cluster, causes in found.items():
        number = sum(failures.number for failures in causes.values())
        gpu_time_s = sum(failures.gpu_time_s for failures in causes.values())
        order = sorted(
            causes, key=lambda cause: (CATEGORIES.index(cause.category), -causes[cause].gpu_time_s)
        )
        rows += [_row(cluster, cause, causes[cause], number, gpu_time_s) for cause in order]
        numbers[f"{slug(cluster)}.failures.number"] = number
        numbers[f"{slug(cluster)}.failures.gpu_time_h"] = gpu_time_s / 3600
        for category in CATEGORIES:
            of_it = [failures for cause, failures in causes.items() if cause.category == category]
            stem = f"{slug(cluster)}.failures.{category.lower()}"
            numbers[f"{stem}.number"] = sum(failures.number for failures in of_it)
            numbers[f"{stem}.share_of_failures"] = (
                sum(failures.number for failures in of_it) / number
            )
            if gpu_time_s:
                numbers[f"{stem}.share_of_gpu_time"] = (
                    sum(failures.gpu_time_s for failures in of_it) / gpu_time_s
                )
        numbers |= _recorded(cluster, causes, number)
        captions[ALL_CLUSTERS if cluster == ALL else cluster] = _sentence(cluster, numbers)
    table = Table.of_rows(COLUMNS, rows)
    return Result(
        table=table, chart=_bars(table, list(found)), caption=sentences(captions), numbers=numbers
    )


def lost_gpu_time(trace: "Trace", *, by: str = "state") -> Result:
    """Chart the GPU time of jobs that did not complete, by state, category of cause, or type.

    Cancelled jobs count too, as in the study: they are 6 to 7% of jobs and over 60% of GPU time
    (section 3.3). Not all of that time is lost, because a cancelled run keeps its checkpoints.

    Args:
        trace: a trace with the column `state`.
        by: `state`, `category` or `type`.

    Raises:
        LeftOut: a column is missing, or every job completed.
    """
    needed = ("state", "type") if by == "type" else ("state",)
    trace.require(*needed)
    table = trace.aggregate("failure_causes").where(is_gpu=True)
    held_s = np.nan_to_num(table["sum_gpu_time_s"].astype(float))
    lost = ~np.isin(table["outcome"], ["completed", "unfinished"])
    if not held_s[lost].sum():
        raise LeftOut("Left out: every GPU job of this trace completed.")
    groups = _groups(table, by)
    rows, numbers, captions, bars = [], {}, {}, {}
    names = list(dict.fromkeys(groups[lost].tolist()))
    for cluster in _clusters(trace, table):
        own = table["cluster"] == cluster
        if not held_s[own & lost].sum() or not trace.has(*needed, cluster=cluster):
            continue
        all_s, all_n = held_s[own].sum(), table["n"][own].sum()
        parts = {name: own & lost & (groups == name) for name in names}
        bars[cluster] = np.array([held_s[part].sum() / 3600 for part in parts.values()])
        for name, part in parts.items():
            if not part.any():
                continue
            number, gpu_time_s = float(table["n"][part].sum()), float(held_s[part].sum())
            rows.append(
                (
                    cluster,
                    name,
                    number,
                    number / all_n,
                    gpu_time_s / 3600,
                    gpu_time_s / max(all_s, 1e-300),
                )
            )
            numbers[f"{slug(cluster)}.lost.{slug(name)}.share_of_jobs"] = number / all_n
            numbers[f"{slug(cluster)}.lost.{slug(name)}.share_of_gpu_time"] = gpu_time_s / max(
                all_s, 1e-300
            )
        total_s = float(held_s[own & lost].sum())
        numbers[f"{slug(cluster)}.lost.share_of_gpu_time"] = total_s / max(all_s, 1e-300)
        largest = max(parts, key=lambda name: float(held_s[parts[name]].sum()))
        captions[cluster] = (
            f"{total_s / 3600:,.0f} of {all_s / 3600:,.0f} GPU-hours "
            f"({total_s / max(all_s, 1e-300):.1%}) went to jobs "
            f"that did not complete, most of it to {largest} "
            f"({float(held_s[parts[largest]].sum()) / max(total_s, 1e-300):.1%})"
        )
    order = sorted(
        range(len(names)), key=lambda index: -sum(float(values[index]) for values in bars.values())
    )
    chart = Bars(
        title=f"GPU time not completed, by {by}",
        value=Axis(label="GPU-hours", low=0),
        groups=[str(names[index]) for index in order],
        parts={cluster: values[order] for cluster, values in bars.items()},
    )
    columns = ("cluster", by, "number", "share_of_jobs", "gpu_time_h", "share_of_gpu_time")
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=[chart], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def failures_by_month(trace: "Trace", *, cpu_jobs: bool = False, top: int = 15) -> Result:
    """Chart the jobs that failed in each UTC month, by reason.

    In the study, NVLink and ECC errors cluster in the hottest month.

    Args:
        trace: a trace with the columns `state` and `end_at`.
        cpu_jobs: True to count failed jobs without GPUs too.
        top: the number of most frequent reasons in the chart; the table has all reasons.

    Raises:
        LeftOut: a column is missing, or no job failed.
    """
    trace.require("state", "end_at")
    table = trace.aggregate("failure_months")
    if not cpu_jobs:
        table = table.where(is_gpu=True)
    if not len(table):
        raise LeftOut(NONE_FAILED)
    causes = np.array(causes_of(table), dtype=object)
    months = table["month"].astype("datetime64[M]")
    rows, panels, numbers, captions = [], [], {}, {}
    for cluster in _clusters(trace, table):
        own = table["cluster"] == cluster
        span = np.arange(months[own].min(), months[own].max() + 1)
        counts = {
            cause: np.array(
                [table["n"][own & (causes == cause) & (months == month)].sum() for month in span]
            )
            for cause in dict.fromkeys(causes[own].tolist())
        }
        order = sorted(counts, key=lambda cause: -float(counts[cause].sum()))
        for cause in order:
            rows += [
                (cluster, str(month), cause.category, cause.reason, float(n))
                for month, n in zip(span, counts[cause], strict=True)
            ]
        totals = np.sum(list(counts.values()), axis=0)
        infrastructure = np.sum(
            [n for cause, n in counts.items() if cause.category == "Infrastructure"]
            or [0 * totals],
            0,
        )
        for month, n, own_n in zip(span, totals, infrastructure, strict=True):
            numbers[f"{slug(cluster)}.failures.{month}.number"] = float(n)
            numbers[f"{slug(cluster)}.failures.{month}.infrastructure.number"] = float(own_n)
        captions[cluster] = (
            f"{words.plainly(int(totals.sum()), 'failure')} in "
            f"{words.plainly(len(span), 'month')}, most ({int(totals.max()):,}) in {span[totals.argmax()]}"
        )
        if infrastructure.any():
            captions[cluster] += (
                f"; of infrastructure most ({int(infrastructure.max()):,}) in "
                f"{span[infrastructure.argmax()]}"
            )
        panels.append(
            Heatmap(
                title=cluster,
                x=Axis(label="Month (UTC)", scale="category", ticks=[str(month) for month in span]),
                y=Axis(label="", scale="category", ticks=[cause.reason for cause in order[:top]]),
                values=np.array([counts[cause] for cause in order[:top]], dtype=float),
                unit="failures",
            )
        )
    return Result(
        table=Table.of_rows(("cluster", "month", "category", "reason", "number"), rows),
        chart=Figure(panels=panels),
        caption=sentences(captions),
        numbers=numbers,
    )


def _by_cause(
    trace: "Trace", *, cpu_jobs: bool, restart_within_s: float
) -> dict[str, dict[Cause, _Failures]]:
    """Group failures by cluster and cause.

    The row `ALL` is added if more than one cluster is not merely a comparison.
    """
    trace.require("state")
    causes, jobs = _failed(trace.aggregate("failure_causes"), cpu_jobs=cpu_jobs)
    run_causes, runs = _failed(trace.aggregate("failure_durations"), cpu_jobs=cpu_jobs)
    has_times = trace.has("submit_at", "start_at", "end_at")
    restart_causes, restarts = (
        _failed(trace.aggregate("failure_restarts"), cpu_jobs=True) if has_times else (None, None)
    )
    found: dict[str, dict[Cause, _Failures]] = {}
    own = [name for name in trace.clusters if name not in trace.compared]
    for name in [*in_order(trace), *([ALL] if len(own) > 1 else [])]:
        members = own if name == ALL else [name]
        for cause in dict.fromkeys(causes.tolist()):
            these = (causes == cause) & np.isin(jobs["cluster"], members)
            if not these.any():
                continue
            ran = (run_causes == cause) & np.isin(runs["cluster"], members)
            restart = Distribution.of([], [])
            if restarts is not None:
                again = (restart_causes == cause) & np.isin(restarts["cluster"], members)
                again &= restarts["restart_s"] <= restart_within_s  # NaN: work did not continue.
                restart = Distribution.of(restarts["restart_s"][again], restarts["n"][again])
            found.setdefault(name, {})[cause] = _Failures(
                number=float(jobs["n"][these].sum()),
                gpu_time_s=float(np.nansum(jobs["sum_gpu_time_s"][these].astype(float))),
                gpus=Distribution.of(jobs["gpu_num"][these], jobs["n"][these]),
                run_s=Distribution.of(runs["run_s"][ran], runs["n"][ran]),
                restart_s=restart,
            )
    return found


def _failed(table: Table, *, cpu_jobs: bool) -> tuple[np.ndarray[Any, Any], Table]:
    """Return the rows of an aggregate that count failures, and the cause of each row."""
    keep = np.ones(len(table), dtype=bool)
    if "outcome" in table:
        keep &= table["outcome"] == "failed"
    if not cpu_jobs:
        keep &= table["is_gpu"] == True  # noqa: E712 - NumPy; missing is neither
    kept = Table({name: column[keep] for name, column in table.columns.items()})
    causes = np.empty(len(kept), dtype=object)
    causes[:] = causes_of(kept)
    return causes, kept


def _row(
    cluster: str, cause: Cause, failures: _Failures, number: float, gpu_time_s: float
) -> tuple[Any, ...]:
    return (
        cluster,
        cause.category,
        cause.reason,
        failures.number,
        failures.number / number,
        failures.gpus.mean,
        failures.gpus.median,
        failures.run_s.mean / 60,
        failures.run_s.median / 60,
        failures.gpu_time_s / 3600,
        failures.gpu_time_s / gpu_time_s if gpu_time_s else np.nan,
        failures.restart_s.mean / 60,
        failures.restart_s.median / 60,
        failures.restart_s.total,
    )


def _recorded(cluster: str, causes: dict[Cause, _Failures], number: float) -> dict[str, float]:
    """Return named numbers of the failures that Table 3 counts, for one cluster.

    These are failures whose cause is in one of the study's categories.
    """
    recorded = {cause: failures for cause, failures in causes.items() if cause.category in STUDIED}
    of_them, gpu_time_s = (
        sum(getattr(failures, what) for failures in recorded.values())
        for what in ("number", "gpu_time_s")
    )
    stem = f"{slug(cluster)}.failures.recorded"
    numbers = {f"{stem}.number": of_them, f"{stem}.share_of_failures": of_them / number}
    for category in STUDIED:
        own = [failures for cause, failures in recorded.items() if cause.category == category]
        key = f"{stem}.{category.lower()}"
        numbers[f"{key}.number"] = sum(failures.number for failures in own)
        if of_them:
            numbers[f"{key}.share_of_failures"] = numbers[f"{key}.number"] / of_them
        if gpu_time_s:
            numbers[f"{key}.share_of_gpu_time"] = (
                sum(failures.gpu_time_s for failures in own) / gpu_time_s
            )
    return numbers


def _sentence(cluster: str, numbers: dict[str, float]) -> str:
    stem = f"{slug(cluster)}.failures"
    failed, hours = (numbers[f"{stem}.{name}"] for name in ("number", "gpu_time_h"))
    caption = (
        f"{words.plainly(round(failed), 'failure')} took {words.plainly(round(hours), 'GPU-hour')}"
    )
    others = [category for category in CATEGORIES if category not in STUDIED]
    caption += _shares(stem, others, numbers, "of them", "of that time")
    recorded = numbers[f"{stem}.recorded.number"]
    if not recorded:
        return caption
    have = "has" if recorded == 1 else "have"
    caption += f"; {recorded:,.0f} {have} a cause in one of the study's categories"
    return caption + _shares(f"{stem}.recorded", STUDIED, numbers, "of these", "of their GPU time")


def _shares(
    stem: str, categories: Sequence[str], numbers: dict[str, float], of_number: str, of_time: str
) -> str:
    words = ""
    for category in categories:
        if share := numbers.get(f"{stem}.{category.lower()}.share_of_failures"):
            time = numbers.get(f"{stem}.{category.lower()}.share_of_gpu_time")
            words += f", {category.lower()} {share:.1%} {of_number}"
            words += f" and {time:.1%} {of_time}" if time is not None else ""
    return words


def _bars(table: Table, clusters: Sequence[str], *, top: int = 20) -> Figure:
    """Return one panel per cluster: each reason's share of failures and of their GPU time."""
    panels = []
    for cluster in clusters:
        own = table.where(cluster=cluster)
        order = np.argsort(-np.nan_to_num(own["share_of_failure_gpu_time"]), kind="stable")[:top]
        panels.append(
            Bars(
                title=cluster,
                value=Axis(label="Share (%)", low=0),
                groups=[f"{own['reason'][row]} ({own['category'][row]})" for row in order],
                parts={
                    "of failures": 100 * own["share_of_failures"][order],
                    "of failure GPU time": 100 * own["share_of_failure_gpu_time"][order],
                },
            )
        )
    return Figure(panels=panels, columns=1)


def _groups(table: Table, by: str) -> np.ndarray[Any, Any]:
    if by == "category":
        failed = table["outcome"] == "failed"
        names = [cause.category for cause in causes_of(table)]
        return np.where(failed, np.array(names, dtype=object), table["state"])
    return np.array([name or UNKNOWN for name in table[by].tolist()], dtype=object)


def _clusters(trace: "Trace", table: Table) -> list[str]:
    present = set(table["cluster"].tolist())
    return [name for name in in_order(trace) if name in present]


ANALYSES = (
    Analysis(
        name="failure_table",
        section="Failures and what they cost",
        title="Failures by cause",
        run=failure_table,
        source="Table 3",
    ),
    Analysis(
        name="lost_gpu_time",
        section="Failures and what they cost",
        title="GPU time of jobs that did not complete",
        run=lost_gpu_time,
        source="Section 3.3",
    ),
    Analysis(
        name="lost_gpu_time_by_type",
        section="Failures and what they cost",
        title="GPU time of jobs that did not complete, by type",
        run=lambda trace: lost_gpu_time(trace, by="type"),
    ),
    Analysis(
        name="failures_by_month",
        section="Failures and what they cost",
        title="Failures over the months",
        run=failures_by_month,
        source="Section 5.2",
    ),
)
