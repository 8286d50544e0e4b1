"""Analyze how full the cluster is: GPUs in use by hour, and the share of the capacity."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core.words import plainly
from holdfast.trace.analyses.cumulative import Counted, Group, cdf_panel, cdf_table
from holdfast.trace.analyses.hourly import HOUR_S, coarser, hourly, starts_s, step_for
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import (
    capacity_gpus,
    in_order,
    role,
    slug,
    some,
    types_in_order,
)
from holdfast.trace.charts import Axis, Figure, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.notes import Note
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

NO_TIMES = "no GPU job has both a start and an end"


def gpus_in_use(trace: "Trace", cluster: str) -> tuple[int, dict[str, Values]]:
    """Return the mean number of GPUs in use in each hour, by type.

    The hours range from the first start to the last submission, because the trace has no arrivals
    after that. Jobs that are still running (state RUNNING, no end) count up to the last hour.

    Returns:
        The first hour, counted from the Unix epoch, and for each type an array with one mean per
        hour. If no job has a start and an end, there are no types.
    """
    found = hourly(trace, cluster, "busy", "type")
    used = [] if found is None else np.flatnonzero(found.hours.sum(axis=0) > 0).tolist()
    if found is None or not used:
        return 0, {}
    begin, end = (
        used[0],
        last_submission_hour(trace, cluster, found.first_hour + found.hours.shape[1] - 1),
    )
    kept = slice(begin, max(begin, end - found.first_hour) + 1)
    by_kind = dict(zip(found.kinds, found.hours, strict=True))
    return found.first_hour + begin, {
        kind: by_kind[kind][kept] for kind in types_in_order(found.kinds)
    }


def capacity_or_peak(trace: "Trace", cluster: str, in_use: Values) -> tuple[float, str]:
    """Return the limit for the number of GPUs in use, and a text that describes the limit.

    The limit is the number of GPUs of the cluster. If this number is unknown, the limit is the
    largest number of GPUs in use in any hour.
    """
    known = capacity_gpus(trace, cluster)
    return (known, "capacity") if known is not None else (float(in_use.max()), "busiest hour seen")


def beyond_capacity(trace: "Trace") -> tuple[Note, ...]:
    """Return a note for each cluster whose jobs hold more GPUs than the cluster has.

    GPUs in use are hourly means as in `gpus_in_use`. In such a cluster the jobs contradict the
    stated size, which no check of a single job can find.
    """
    notes = []
    for cluster in in_order(trace):
        known = capacity_gpus(trace, cluster)
        if known is None or not trace.has("start_at", "end_at", "gpu_num", cluster=cluster):
            continue
        first, by_type = gpus_in_use(trace, cluster)
        total = np.sum(list(by_type.values()), axis=0) if by_type else np.zeros(0)
        over = np.flatnonzero(total > known * (1 + 1e-9))
        if len(over):
            worst = int(total.argmax())
            at = np.datetime64(first + worst, "h")
            notes.append(
                Note(
                    cluster=cluster,
                    check="beyond-capacity",
                    sentence=f"In {plainly(len(over), 'hour')} jobs hold more GPUs than the "
                    f"{known:,.0f} there are: "
                    f"{total[worst]:,.1f} on average in the worst.",
                    rows=len(over),
                    action="kept",
                    examples=(f"{at}:00 UTC",),
                )
            )
    return tuple(notes)


def gpus_over_time(trace: "Trace", *, points: int = 1000) -> Result:
    """Chart GPUs in use over time, stacked by type, with the capacity as a limit line.

    If the capacity is unknown, the line shows the busiest hour. Clusters that serve only for
    comparison are left out. Columns of the table: `cluster`, `type`, `at_s` (Unix epoch, start of
    the mean), `gpus` (mean in use).

    Args:
        trace: the trace.
        points: the most points of a curve. If there are more hours, each point is the mean of
            several hours.

    Raises:
        LeftOut: no GPU job has a start and an end.
    """
    tables, panels, sentences = [], [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        first, by_type = gpus_in_use(trace, cluster)
        if not by_type or cluster in trace.compared:
            continue
        total = np.sum(list(by_type.values()), axis=0)
        limit, meaning = capacity_or_peak(trace, cluster, total)
        step = step_for(len(total), points)
        at_s = starts_s(first, len(total), step)
        below = np.zeros(len(at_s))
        series = []
        for kind, means in by_type.items():
            gpus = coarser(means, step)
            tables.append(
                (np.full(len(at_s), cluster, object), np.full(len(at_s), kind, object), at_s, gpus)
            )
            share = means.sum() / max(total.sum(), 1e-300)
            label = f"{kind} ({share:.1%} of {total.sum():,.0f} GPU h)"
            series.append(Series(label=label, x=at_s, y=below + gpus, low=below, high=below + gpus))
            below = below + gpus
        ends = at_s[[0, -1]]
        series.append(
            Series(label=f"{meaning}: {limit:,.0f}", x=ends, y=np.full(2, limit), style="dashed")
        )
        panels.append(
            Lines(
                title=f"{cluster}, means of {step} h" if step > 1 else f"{cluster}, hourly means",
                x=Axis(label="time (UTC)", scale="time"),
                y=Axis(label="GPUs in use", low=0.0),
                series=series,
            )
        )
        numbers |= {
            f"{slug(cluster)}.in_use.mean_gpus": float(total.mean()),
            f"{slug(cluster)}.in_use.max_gpus": float(total.max()),
            f"{slug(cluster)}.in_use.gpu_time_h": float(total.sum()),
        }
        sentences.append(
            f"{cluster}: {plainly(round(total.mean()), 'GPU')} in use on average over {plainly(len(total), 'hour')}, "
            f"{total.max():,.0f} in the busiest, of {limit:,.0f} ({meaning})."
        )
    some(panels, NO_TIMES)
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)]
    return Result(
        table=Table(dict(zip(("cluster", "type", "at_s", "gpus"), columns, strict=True))),
        chart=Figure(panels=panels, columns=1),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def allocation(trace: "Trace") -> Result:
    """Chart the share of GPUs in use, as a CDF over hours.

    The share is the GPUs in use divided by the capacity. If the capacity is unknown, the GPUs in
    use in the busiest hour take its place. Columns of the table: `cluster`, `part` (`capacity` or
    `busiest hour seen`), `weight`, `share_in_use`, `share_at_most`.

    Raises:
        LeftOut: no GPU job has a start and an end.
    """
    groups, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        by_type = gpus_in_use(trace, cluster)[1]
        if not by_type:
            continue
        total = np.sum(list(by_type.values()), axis=0)
        limit, meaning = capacity_or_peak(trace, cluster, total)
        shares = Distribution.of(total / limit, np.ones(len(total)))
        counted = Counted(jobs=shares, gpu_time=Distribution.of([], []))
        label = f"{cluster}, of {meaning}"
        groups.append(
            Group(
                label=label,
                cluster=cluster,
                part=meaning,
                counted=counted,
                role=role(trace, cluster),
            )
        )
        over = float((total > limit * (1 + 1e-9)).sum())
        numbers |= {
            f"{slug(cluster)}.allocation.mean": shares.mean,
            f"{slug(cluster)}.allocation.median": shares.median,
            f"{slug(cluster)}.allocation.hours_above_capacity": over,
        }
        contradiction = (
            f"; in {plainly(round(over), 'hour')} more is in use than there is" if over else ""
        )
        sentences.append(
            f"{cluster}: jobs hold {shares.mean:.1%} of the GPUs on average (of {meaning}, "
            f"{limit:,.0f}; median hour "
            f"{shares.median:.1%}, {plainly(len(total), 'hour')}){contradiction}."
        )
    some(groups, NO_TIMES)
    return Result(
        table=cdf_table(groups, column="share_in_use", weights=["jobs"]),
        chart=Figure(
            panels=[
                cdf_panel(groups, x=Axis(label="share of GPUs held by jobs", low=0.0), of="hours")
            ],
            columns=1,
        ),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def last_submission_hour(trace: "Trace", cluster: str, otherwise: int) -> int:
    """Return the hour of the last submission, or `otherwise` if no job has a submission time."""
    table = trace.query(
        f"SELECT coalesce(floor(epoch(max(max_submit_at)) / {HOUR_S})::INTEGER, ?) AS hour "
        f"FROM {trace.prepare('job_counts')} WHERE cluster = ?",
        [otherwise, cluster],
    )
    return min(otherwise, int(table["hour"][0]))


ANALYSES = (
    Analysis(
        name="gpus_over_time", section="Waiting and capacity", title="GPUs in use over time", run=gpus_over_time
    ),
    Analysis(name="allocation", section="Waiting and capacity", title="How full the cluster is", run=allocation),
)  # fmt: skip
