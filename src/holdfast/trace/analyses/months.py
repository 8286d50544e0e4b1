"""Analyze the trend by month: GPUs in use, how long jobs wait, and GPU time lost to failures."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.capacity import NO_TIMES, capacity_or_peak, gpus_in_use
from holdfast.trace.analyses.hourly import HOUR_S
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, slug, some
from holdfast.trace.charts import Axis, Bars, Figure, Panel
from holdfast.trace.distribution import Distribution
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

NAN = float("nan")
COLUMNS = ("cluster", "month", "gpus_in_use", "share_in_use", "p95_queue_s", "lost_gpu_time_h")
Month = np.datetime64
Values = npt.NDArray[np.float64]


def month_by_month(trace: "Trace") -> Result:
    """Chart the share of GPUs in use, 95th percentile of waits, and lost GPU time by UTC month.

    GPUs in use are means over the hours of a month that the trace covers (`gpus_in_use`). A wait
    counts for the month of the submission. Lost GPU time is the GPU time of failed jobs, and counts
    for the month in which the job ended. Clusters that serve only for comparison are left out.
    Columns of the table: `cluster`, `month`, `gpus_in_use`, `share_in_use`, `p95_queue_s`,
    `lost_gpu_time_h`.

    Raises:
        LeftOut: no GPU job has a start and an end.
    """
    rows: list[tuple[object, ...]] = []
    panels: list[Panel] = []
    sentences = []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        first, by_type = gpus_in_use(trace, cluster)
        if not by_type or cluster in trace.compared:
            continue
        total = np.sum(list(by_type.values()), axis=0)
        limit, meaning = capacity_or_peak(trace, cluster, total)
        months = (np.datetime64(first, "h") + np.arange(len(total))).astype("datetime64[M]")
        waits, lost = _waits(trace, cluster), _lost(trace, cluster)
        own = [
            (
                cluster,
                str(month),
                float(total[months == month].mean()),
                float(total[months == month].mean() / limit),
                waits.get(month, NAN),
                NAN if lost is None else lost.get(month, 0.0),
            )
            for month in np.unique(months)
        ]
        rows += own
        names = [str(row[1]) for row in own]
        shares, p95_s, lost_h = (np.array([row[place] for row in own]) for place in (3, 4, 5))
        panels += [
            Bars(
                title=f"{cluster}, GPUs in use ({meaning}: {limit:,.0f})",
                value=Axis(label="share of GPUs in use", low=0.0),
                groups=names,
                parts={"in use": shares},
            ),
            Bars(
                title=f"{cluster}, 95 of 100 GPU jobs wait at most",
                value=Axis(label="queue time (s)", scale="symlog", low=0.0),
                groups=names,
                parts={"wait": p95_s},
            ),
            Bars(
                title=f"{cluster}, lost to failures",
                value=Axis(label="GPU-hours", low=0.0),
                groups=names,
                parts={"lost": lost_h},
            ),
        ]
        for name, share, p95, hours in zip(names, shares, p95_s, lost_h, strict=True):
            key = f"{slug(cluster)}.months.{name}"
            numbers |= {f"{key}.share_in_use": float(share), f"{key}.p95_queue_s": float(p95)}
            numbers[f"{key}.lost_gpu_time_h"] = float(hours)
        sentences.append(_sentence(cluster, names, shares))
    some(panels, NO_TIMES)
    return Result(
        table=Table.of_rows(COLUMNS, rows),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def _sentence(cluster: str, names: list[str], shares: Values) -> str:
    if len(names) == 1:
        return f"{cluster}: {words.percent(float(shares[0]))} of the GPUs in use in {names[0]}."
    low, high = int(shares.argmin()), int(shares.argmax())
    return (
        f"{cluster}: {words.percent(float(shares[low]))} of the GPUs in use in {names[low]}, the "
        f"least, and {words.percent(float(shares[high]))} in {names[high]}, the most."
    )


def _waits(trace: "Trace", cluster: str) -> dict[Month, float]:
    """Return the 95th percentile of the waits of GPU jobs by month of submission, in seconds."""
    table = trace.aggregate("queue_months").where(cluster=cluster, is_gpu=True)
    months = table["month"].astype("datetime64[M]")
    return {
        month: float(
            Distribution.of(
                table["queue_s"][months == month], table["n"][months == month]
            ).quantile(0.95)
        )
        for month in np.unique(months)
    }


def _lost(trace: "Trace", cluster: str) -> dict[Month, float] | None:
    """Return the GPU-hours of failed jobs by month of their end; None if states are unknown."""
    if not trace.has("state", cluster=cluster):
        return None
    table = trace.aggregate("failure_months").where(cluster=cluster, is_gpu=True)
    months = table["month"].astype("datetime64[M]")
    held_s = np.nan_to_num(table["sum_gpu_time_s"].astype(float))
    return {month: float(held_s[months == month].sum()) / HOUR_S for month in np.unique(months)}


ANALYSES = (
    Analysis(
        name="months",
        section="The cluster and its jobs",
        title="Month by month",
        run=month_by_month,
    ),
)
