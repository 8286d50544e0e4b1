"""Attribute waiting to the jobs that held the GPUs, and find waits while enough GPUs were free."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.hourly import hourly
from holdfast.trace.analyses.queues import queues
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import (
    OTHERS,
    capacity_gpus,
    in_order,
    named,
    role,
    size_label,
    size_of,
    size_slug,
    slug,
    some,
    types_in_order,
)
from holdfast.trace.charts import Axis, Bars, Figure, Heatmap, Lines, Series
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

NO_TIMES = "no GPU job has a time of submission, a start and an end"
NOBODY = "nobody"
"""Name of the holder in an hour in which no GPU is in use."""
WEIGHTS: dict[Literal["waiting", "wanted"], str] = {
    "waiting": "job-hours waited",
    "wanted": "GPU-hours waited",
}


def who_waits(
    trace: "Trace", cluster: str, by: Literal["type", "pool"], measure: Literal["waiting", "wanted"]
) -> tuple[list[str], Values]:
    """Attribute the waiting of each kind of job to the kinds that held GPUs at the same time.

    The waiting within an hour is divided in proportion to the GPU time that each kind held in that
    hour, including the kind that waits. A kind that held GPUs did not necessarily hold those that
    the waiting job would have received.

    Args:
        trace: the trace.
        cluster: one of the trace's clusters.
        by: the column that defines the kinds: `type` or `pool`.
        measure: `waiting` counts one hour of a job as 1, `wanted` as the number of GPUs that the
            job requests.

    Returns:
        The kinds, and an array of shape (kinds, kinds + 1): the kind that waits by the kind that
        holds, in job-hours or GPU-hours. The last column is `NOBODY`. The total is all the waiting
        of jobs that started.
    """
    waited, held = hourly(trace, cluster, measure, by), hourly(trace, cluster, "busy", by)
    if waited is None or held is None:
        return [], np.zeros((0, 1))
    total = held.hours.sum(axis=0)
    shares = np.vstack([held.hours / np.where(total > 0, total, 1.0), total <= 0])
    return waited.kinds, np.asarray(waited.hours @ shares.T)


def who_waits_for_whom(trace: "Trace") -> Result:
    """Chart waiting by the type that waits and the type that holds GPUs.

    `who_waits` attributes the waiting, in job-hours and in GPU-hours. Columns of the table:
    `cluster`, `weight`, `waiter`, `holder`, `hours`, `share_of_waiting`.

    Raises:
        LeftOut: no cluster has types, or no GPU job has a submission, a start and an end time.
    """
    trace.require("type")
    return _matrix(trace, "type", most=None)


def who_waits_for_whom_by_pool(trace: "Trace", *, most: int = 12) -> Result:
    """Chart waiting by the pool that waits and the pool that holds GPUs.

    The `most` pools that waited longest have a row each, and all others share one. The table has
    the columns of `who_waits_for_whom`.

    Raises:
        LeftOut: no cluster has pools, or no GPU job has a submission, a start and an end time.
    """
    trace.require("pool")
    return _matrix(trace, "pool", most=most)


def _matrix(trace: "Trace", by: Literal["type", "pool"], *, most: int | None) -> Result:
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        if not trace.has(by, cluster=cluster):
            continue
        order: list[int] | None = None
        for measure, unit in WEIGHTS.items():
            found, matrix = who_waits(trace, cluster, by, measure)
            if not named(found):
                break
            order = _order(found, matrix, by) if order is None else order
            kinds, matrix = _gathered(found, matrix, order, most)
            total = matrix.sum()
            if total <= 0:
                break
            holders = [*kinds, NOBODY] if matrix[:, -1].any() else kinds
            panels.append(
                Heatmap(
                    title=f"{cluster}: {total:,.0f} {unit}",
                    x=Axis(label="who held the GPUs", scale="category", ticks=holders),
                    y=Axis(label="who waited", scale="category", ticks=kinds),
                    values=matrix[:, : len(holders)],
                    unit=unit,
                )
            )
            key, kind = f"{slug(cluster)}.{measure}", "pool_" if by == "pool" else ""
            numbers[f"{key}.total_h"] = float(total)
            for row, waiter in enumerate(kinds):
                for column, holder in enumerate(holders):
                    hours = float(matrix[row, column])
                    rows.append((cluster, unit, waiter, holder, hours, hours / total))
                    numbers[f"{key}.{kind}{slug(waiter)}_for_{slug(holder)}_h"] = hours
            greatest, of = divmod(int(matrix.argmax()), matrix.shape[1])
            longest = int(matrix.sum(axis=1).argmax())
            sentences.append(
                f"{cluster}, {unit}: {kinds[longest]} does {matrix[longest].sum() / total:.1%} of "
                f"{total:,.0f}; the "
                f"largest part is {kinds[greatest]} while {[*kinds, NOBODY][of]} held the GPUs "
                f"({matrix[greatest, of] / total:.1%})."
            )
    some(panels, f"{NO_TIMES}, and a {by}")
    return Result(
        table=Table.of_rows(
            ("cluster", "weight", "waiter", "holder", "hours", "share_of_waiting"), rows
        ),
        chart=Figure(panels=panels),
        caption=" ".join(
            [*sentences, "Each hour's waiting is split by the GPU time that each held in it."]
        ),
        numbers=numbers,
    )


def _order(kinds: Sequence[str], matrix: Values, by: str) -> list[int]:
    """Return the order of the kinds: types as in the study, pools by waiting, the longest first."""
    if by == "type":
        return [list(kinds).index(name) for name in types_in_order(kinds)]
    return [int(place) for place in np.argsort(-matrix.sum(axis=1), kind="stable")]


def _gathered(
    kinds: Sequence[str], matrix: Values, order: Sequence[int], most: int | None
) -> tuple[list[str], Values]:
    """Reorder the matrix, and combine all kinds after the first `most` as `others`."""
    kept = order if most is None else order[:most]
    others = [] if most is None else order[most:]
    into = np.zeros((len(kinds), len(kept) + bool(others)))
    into[kept, range(len(kept))] = 1.0
    into[others, len(kept) :] = 1.0
    columns = np.zeros((len(kinds) + 1, into.shape[1] + 1))
    columns[:-1, :-1], columns[-1, -1] = into, 1.0
    return [
        *(kinds[place] for place in kept),
        *([OTHERS] if others else []),
    ], into.T @ matrix @ columns


def wait_by_size(trace: "Trace") -> Result:
    """Chart the mean and median wait of GPU jobs by number of GPUs, in power-of-two buckets.

    Columns of the table: `cluster`, `gpus` (the bucket), `size` (its upper end; 0.5 for less than
    one GPU), `n`, `mean_queue_s`, `median_queue_s`.

    Raises:
        LeftOut: no GPU job has both a submission time and a start time.
    """
    rows: list[tuple[object, ...]] = []
    panels: dict[str, list[Series]] = {"mean": [], "median": []}
    sentences = []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        parts = trace.query(
            f"SELECT DISTINCT part FROM {trace.prepare('job_queues')} "
            "WHERE cluster = ? AND split = 'gpu_num' AND is_gpu",
            [cluster],
        )
        buckets: dict[float, list[str]] = {}
        for part in parts["part"].tolist():
            buckets.setdefault(size_of(float(part)), []).append(part)
        if not buckets:
            continue
        sizes = sorted(buckets)
        waits = [
            queues(trace, cluster, split="gpu_num", parts=buckets[size]).jobs for size in sizes
        ]
        for size, wait in zip(sizes, waits, strict=True):
            label = size_label(size)
            rows.append((cluster, label, size, wait.total, wait.mean, wait.median))
            numbers[f"{slug(cluster)}.{size_slug(label)}.mean_queue_s"] = wait.mean
        n = sum(wait.total for wait in waits)
        for name, values in (
            ("mean", [wait.mean for wait in waits]),
            ("median", [wait.median for wait in waits]),
        ):
            panels[name].append(
                Series(
                    label=f"{cluster} (n = {n:,.0f})",
                    x=np.array(sizes),
                    y=np.array(values),
                    role=role(trace, cluster),
                )
            )
        longest = max(range(len(sizes)), key=lambda place: waits[place].mean)
        sentences.append(
            f"{cluster}: jobs of {size_label(sizes[longest])} GPUs wait longest, "
            f"{words.duration(waits[longest].mean)} on average (n = {waits[longest].total:,.0f} of "
            f"{n:,.0f})."
        )
    some(rows, "no GPU job has both a time of submission and one of start")
    return Result(
        table=Table.of_rows(
            ("cluster", "gpus", "size", "n", "mean_queue_s", "median_queue_s"), rows
        ),
        chart=Figure(
            panels=[
                Lines(
                    x=Axis(label="GPUs per job, at most", scale="log2"),
                    y=Axis(label=f"{name} queue time (s)", scale="symlog", low=0.0),
                    series=series,
                )
                for name, series in panels.items()
            ]
        ),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def waiting_while_free(trace: "Trace") -> Result:
    """Chart the share of waiting in hours with enough free GPUs for the waiting job, by size.

    Waiting in such hours is not caused by a lack of GPUs, but by fragmentation, quota, priority or
    the scheduler's own time. The share is an estimate, because the hourly mean of free GPUs hides
    minutes in which the cluster was full. Columns of the table: `cluster`, `gpus` (bucket),
    `waited_h` (job-hours), `waited_while_free_h`, `share_while_free`.

    Raises:
        LeftOut: the capacity of no cluster is known, or no GPU job has a submission, a start and an
            end time.
    """
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        capacity = capacity_gpus(trace, cluster)
        busy, waited = (
            hourly(trace, cluster, "busy", "type"),
            hourly(trace, cluster, "waiting", "gpu_num"),
        )
        if capacity is None or busy is None or waited is None:
            continue
        gpu_num = np.array([float(kind) for kind in waited.kinds])
        enough = capacity - busy.hours.sum(axis=0) >= gpu_num[:, None]
        buckets = np.array([size_of(number) for number in gpu_num.tolist()])
        sizes = np.unique(buckets)
        all_h = np.array([waited.hours[buckets == size].sum() for size in sizes])
        free_h = np.array([(waited.hours * enough)[buckets == size].sum() for size in sizes])
        if all_h.sum() <= 0:
            continue
        share = free_h / np.where(all_h > 0, all_h, 1.0)
        labels = [size_label(float(size)) for size in sizes]
        rows += [
            (cluster, *row)
            for row in zip(labels, all_h.tolist(), free_h.tolist(), share.tolist(), strict=True)
        ]
        panels.append(
            Bars(
                title=f"{cluster} ({all_h.sum():,.0f} job-hours waited)",
                value=Axis(label="share of waiting while enough GPUs were free", low=0.0, high=1.0),
                groups=[
                    f"{label} ({h:,.0f} h)" for label, h in zip(labels, all_h.tolist(), strict=True)
                ],
                parts={"share": share},
            )
        )
        overall = float(free_h.sum() / all_h.sum())
        numbers[f"{slug(cluster)}.waiting.share_while_free"] = overall
        numbers |= {
            f"{slug(cluster)}.{size_slug(label)}.share_while_free": float(each)
            for label, each in zip(labels, share, strict=True)
        }
        sentences.append(
            f"{cluster}: {overall:.1%} of {all_h.sum():,.0f} job-hours were waited while, in the "
            "hour's mean, enough "
            f"of the {words.plainly(round(capacity), 'GPU')} were free: for quota, placement or the scheduler, not "
            "for want of GPUs."
        )
    some(panels, f"the capacity of no cluster is known, or {NO_TIMES}")
    return Result(
        table=Table.of_rows(
            ("cluster", "gpus", "waited_h", "waited_while_free_h", "share_while_free"), rows
        ),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="who_waits_for_whom", section="Waiting and capacity", title="Who waits for whom", run=who_waits_for_whom
    ),
    Analysis(
        name="who_waits_for_whom_by_pool", section="Waiting and capacity", title="Who waits for whom, by pool",
        run=who_waits_for_whom_by_pool,
    ),
    Analysis(
        name="wait_by_size", section="Waiting and capacity", title="Waiting against the number of GPUs",
        run=wait_by_size,
    ),
    Analysis(
        name="waiting_while_free", section="Waiting and capacity", title="Waiting while enough GPUs were free",
        run=waiting_while_free,
    ),
)  # fmt: skip
