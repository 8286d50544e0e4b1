"""Analyze when jobs arrive: by hour of the day, by weekday, by date, and in bursts."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.cumulative import Counted, Group, cdf_panel, cdf_table
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import (
    UNKNOWN,
    in_order,
    named,
    role,
    slug,
    some,
    types_in_order,
)
from holdfast.trace.charts import Axis, Bars, Figure, Heatmap, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
NOT_SUBMITTED = "no GPU job has a time of submission"
QUARTERS_AN_HOUR = 4
EPOCH_WEEKDAY = 3
"""Weekday of 1 January 1970, a Thursday; Monday is 0."""


def hourly_arrivals(trace: "Trace", cluster: str) -> tuple[int, dict[str, Values]]:
    """Count the GPU jobs submitted in each local hour, by type, from the first hour to the last.

    Returns:
        The first local hour, counted in hours since 1 January 1970, and for each type an array with
        one count per hour. Jobs without a type are counted as `UNKNOWN`. If nothing was submitted,
        there are no types.
    """
    table = trace.query(
        f"SELECT coalesce(type, '{UNKNOWN}') AS type, "
        "floor((quarter + ?) / ?)::INTEGER AS hour, sum(n)::DOUBLE AS n "
        f"FROM {trace.prepare('job_arrivals')} WHERE cluster = ? AND is_gpu GROUP BY ALL",
        [round(trace.clusters[cluster].utc_offset_h * QUARTERS_AN_HOUR), QUARTERS_AN_HOUR, cluster],
    )
    if not len(table):
        return 0, {}
    first = int(table["hour"].min())
    length = int(table["hour"].max()) - first + 1
    counts = {}
    for kind in types_in_order(table["type"].tolist()):
        own = table.where(type=kind)
        counts[kind] = np.bincount(
            own["hour"].astype(np.int64) - first, weights=own["n"], minlength=length
        ).astype(float)
    return first, counts


def arrival_rhythm(trace: "Trace") -> Result:
    """Chart GPU jobs submitted per hour over the local hour of the day, by weekday and by type.

    Columns of the table: `cluster`, `by` (`weekday` or `type`), `row`, `hour_of_day`, `jobs`,
    `jobs_an_hour`. `jobs_an_hour` is `jobs` divided by how often this hour occurred between the
    first and the last submission.

    Raises:
        LeftOut: no GPU job has a submission time.
    """
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        first, counts = hourly_arrivals(trace, cluster)
        if not counts:
            continue
        all_types = np.sum(list(counts.values()), axis=0)
        hour = first + np.arange(len(all_types))
        of_day, weekday = hour % 24, (hour // 24 + EPOCH_WEEKDAY) % 7
        by_weekday = _cells(all_types, weekday, of_day, len(DAYS))
        by_type = [_cells(count, np.zeros_like(hour), of_day, 1) for count in counts.values()]
        jobs = np.concatenate([by_weekday[0], *(cells[0] for cells in by_type)])
        rates = np.concatenate([by_weekday[1], *(cells[1] for cells in by_type)])
        names = [("weekday", day) for day in DAYS] + [("type", kind) for kind in counts]
        rows += [
            (cluster, by, row, at, jobs[place, at], rates[place, at])
            for place, (by, row) in enumerate(names)
            for at in range(24)
        ]
        hours = Axis(
            label=_clock(trace, cluster), scale="category", ticks=[str(at) for at in range(24)]
        )
        panels.append(
            _heatmap(
                f"{cluster} (n = {all_types.sum():,.0f})", hours, DAYS, rates[: len(DAYS)], "jobs/h"
            )
        )
        # Types differ by orders of magnitude, so each row shows the share of its type's own day.
        totals = jobs[len(DAYS) :].sum(axis=1)
        own_day = jobs[len(DAYS) :] / totals[:, None]
        labels = [f"{kind} (n = {n:,.0f})" for kind, n in zip(counts, totals.tolist(), strict=True)]
        panels.append(_heatmap(cluster, hours, labels, own_day, "share of the type's jobs"))
        by_hour = np.bincount(of_day, weights=all_types, minlength=24) / np.maximum(
            np.bincount(of_day, minlength=24), 1
        )
        busiest, quietest = int(by_hour.argmax()), int(by_hour.argmin())
        weekend = float(all_types[weekday >= 5].sum() / all_types.sum())
        numbers |= {
            f"{slug(cluster)}.arrivals.busiest_hour": busiest,
            f"{slug(cluster)}.arrivals.busiest_jobs_an_hour": float(by_hour[busiest]),
            f"{slug(cluster)}.arrivals.quietest_hour": quietest,
            f"{slug(cluster)}.arrivals.quietest_jobs_an_hour": float(by_hour[quietest]),
            f"{slug(cluster)}.arrivals.weekend_share": weekend,
        }
        sentences.append(
            f"{cluster}: GPU jobs arrive most at {busiest}:00 ({by_hour[busiest]:,.1f} per hour) "
            "and least at "
            f"{quietest}:00 ({by_hour[quietest]:,.1f}), {weekend:.1%} of {all_types.sum():,.0f} at "
            "the weekend."
        )
    some(panels, NOT_SUBMITTED)
    return Result(
        table=Table.of_rows(("cluster", "by", "row", "hour_of_day", "jobs", "jobs_an_hour"), rows),
        chart=Figure(panels=panels),
        caption=" ".join([*sentences, "Hours are of the cluster's own clock."]),
        numbers=numbers,
    )


def submissions_per_day(trace: "Trace") -> Result:
    """Chart GPU jobs submitted on each local day by type, with one panel per cluster.

    Days without a submission count 0. Columns of the table: `cluster`, `type`, `day_start_s` (Unix
    epoch, start of the local day), `jobs`.

    Raises:
        LeftOut: no GPU job has a submission time.
    """
    tables, panels, sentences = [], [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        first, counts = hourly_arrivals(trace, cluster)
        if not counts:
            continue
        offset_s = trace.clusters[cluster].utc_offset_h * 3600
        day = (first + np.arange(len(next(iter(counts.values()))))) // 24
        start_s = np.arange(day[0], day[-1] + 1) * 86400.0 - offset_s
        daily = {
            kind: np.bincount(day - day[0], weights=count).astype(float)
            for kind, count in counts.items()
        }
        tables += [
            (
                np.full(len(start_s), cluster, object),
                np.full(len(start_s), kind, object),
                start_s,
                count,
            )
            for kind, count in daily.items()
        ]
        panels.append(
            Lines(
                title=cluster,
                x=Axis(label="day", scale="time"),
                y=Axis(label="GPU jobs submitted per day", scale="symlog", low=0.0),
                series=[
                    Series(
                        label=f"{kind} (n = {count.sum():,.0f})",
                        x=start_s,
                        y=count,
                        role=role(trace, cluster),
                    )
                    for kind, count in daily.items()
                ],
            )
        )
        total = np.sum(list(daily.values()), axis=0)
        numbers |= {
            f"{slug(cluster)}.arrivals.mean_jobs_a_day": float(total.mean()),
            f"{slug(cluster)}.arrivals.max_jobs_a_day": float(total.max()),
        }
        sentences.append(
            f"{cluster}: {words.plainly(round(total.mean()), 'GPU job')} per day on average "
            f"over {words.plainly(len(total), 'day')}, {total.max():,.0f} on "
            f"the busiest (n = {total.sum():,.0f})."
        )
    some(panels, NOT_SUBMITTED)
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)]
    return Result(
        table=Table(dict(zip(("cluster", "type", "day_start_s", "jobs"), columns, strict=True))),
        chart=Figure(panels=panels, columns=1),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def burstiness(trace: "Trace") -> Result:
    """Chart the index of dispersion of hourly submissions of GPU jobs, by type.

    The index is the variance of the hourly counts divided by their mean (Fano factor; Cox and
    Lewis, The Statistical Analysis of Series of Events, 1966). The counts cover the whole hours
    from the cluster's first submission to its last. The index is 1 for independent arrivals
    (Poisson) and greater for bursts.

    There is one panel per cluster. Columns of the table: `cluster`, `type`, `hours`, `jobs`,
    `mean_jobs_an_hour`, `dispersion`, `max_jobs_an_hour`.

    Raises:
        LeftOut: no cluster has GPU jobs submitted over two hours or more.
    """
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        counts = hourly_arrivals(trace, cluster)[1]
        if not counts or len(next(iter(counts.values()))) < 2:
            continue
        shown = {"all": np.sum(list(counts.values()), axis=0)} | counts
        index = {kind: float(count.var() / count.mean()) for kind, count in shown.items()}
        for kind, count in shown.items():
            rows.append(
                (cluster, kind, len(count), count.sum(), count.mean(), index[kind], count.max())
            )
            numbers[
                f"{slug(cluster)}.{'gpu_job' if kind == 'all' else slug(kind)}.hourly_dispersion"
            ] = index[kind]
        panels.append(
            Bars(
                title=cluster,
                value=Axis(label="variance / mean of hourly submissions", scale="log"),
                groups=[f"{kind} (n = {count.sum():,.0f})" for kind, count in shown.items()],
                parts={"index of dispersion": np.array(list(index.values()))},
            )
        )
        most = max(named(counts), key=lambda kind: index[kind], default=None)
        of_type = "" if most is None else f", that of {most} {index[most]:,.1f} times"
        sentences.append(
            f"{cluster}: the hourly count of GPU jobs varies {index['all']:,.1f} times as much as "
            "independent arrivals "
            f"would (variance over mean, {words.plainly(len(shown['all']), 'hour')})"
            f"{of_type}."
        )
    some(panels, f"{NOT_SUBMITTED}, or all within an hour")
    columns = (
        "cluster",
        "type",
        "hours",
        "jobs",
        "mean_jobs_an_hour",
        "dispersion",
        "max_jobs_an_hour",
    )
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def evaluation_batches(trace: "Trace", *, checkpoint_datasets: int = 60) -> Result:
    """Chart how many evaluations are submitted together, within the same minute.

    The chart is a CDF over evaluations. Columns of the table: `cluster`, `part`, `weight`, `batch`,
    `share_at_most`. `share_at_most` is the share of evaluations that were submitted in a minute
    with at most `batch` evaluations.

    Args:
        trace: the trace.
        checkpoint_datasets: the number of evaluations that one checkpoint needs, about 60 in the
            study (section 3.2).

    Raises:
        LeftOut: no evaluation has a submission time.
    """
    groups, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        table = trace.query(
            f"SELECT batch, count(*)::DOUBLE AS minutes FROM (SELECT sum(n)::DOUBLE AS batch FROM "
            f"{trace.prepare('job_evaluation_minutes')} WHERE cluster = ? GROUP BY minute) GROUP "
            "BY batch",
            [cluster],
        )
        batches = Distribution.of(table["batch"], table["batch"] * table["minutes"])
        if batches.total == 0:
            continue
        nothing = Distribution.of([], [])
        groups.append(
            Group(
                label=cluster,
                cluster=cluster,
                counted=Counted(jobs=batches, gpu_time=nothing),
                role=role(trace, cluster),
            )
        )
        large = 1 - float(batches.at_most(checkpoint_datasets - 1))
        numbers |= {
            f"{slug(cluster)}.evaluation.median_batch": batches.median,
            f"{slug(cluster)}.evaluation.max_batch": float(batches.values[-1]),
            f"{slug(cluster)}.evaluation.share_in_batches_from_{checkpoint_datasets}": large,
        }
        sentences.append(
            f"{cluster}: the median evaluation is submitted within a minute of "
            f"{batches.median - 1:,.0f} others, and "
            f"{large:.1%} of {batches.total:,.0f} in minutes with {checkpoint_datasets} or more."
        )
    some(groups, "no evaluation has a time of submission")
    axis = Axis(label="evaluations submitted in the same minute", scale="log", low=1.0)
    return Result(
        table=cdf_table(groups, column="batch", weights=["jobs"]),
        chart=Figure(panels=[cdf_panel(groups, x=axis, of="evaluations")], columns=1),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def _cells(
    count: Values, row: npt.NDArray[np.int64], column: npt.NDArray[np.int64], rows: int
) -> tuple[Values, Values]:
    """Return sums and hourly means by row and hour of the day, each of shape (rows, 24).

    A mean is NaN if that hour did not occur.
    """
    place, cells = row * 24 + column, rows * 24
    sums = np.bincount(place, weights=count, minlength=cells).reshape(rows, 24).astype(float)
    hours = np.bincount(place, minlength=cells).reshape(rows, 24)
    return sums, np.where(hours > 0, sums / np.maximum(hours, 1), np.nan)


def _heatmap(
    title: str, hours: Axis, rows: "list[str] | tuple[str, ...]", values: Values, unit: str
) -> Heatmap:
    return Heatmap(
        title=title,
        x=hours,
        y=Axis(label="", scale="category", ticks=list(rows)),
        values=values,
        unit=unit,
    )


def _clock(trace: "Trace", cluster: str) -> str:
    offset_h = trace.clusters[cluster].utc_offset_h
    return f"hour of the day (UTC{offset_h:+g} h)" if offset_h else "hour of the day (UTC)"


ANALYSES = (
    Analysis(
        name="arrival_rhythm", section="The cluster and its jobs", title="When in the day and the week jobs arrive",
        run=arrival_rhythm,
    ),
    Analysis(
        name="submissions_per_day", section="The cluster and its jobs", title="Jobs submitted day by day",
        run=submissions_per_day,
    ),
    Analysis(
        name="burstiness", section="The cluster and its jobs", title="How burstily jobs arrive", run=burstiness
    ),
    Analysis(
        name="evaluation_batches", section="The cluster and its jobs", title="Evaluations come in batches",
        run=evaluation_batches,
    ),
)  # fmt: skip
