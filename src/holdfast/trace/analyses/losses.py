"""Analyze which users lose GPU time to failures, and why."""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.measured import sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import UNKNOWN, in_order, slug
from holdfast.trace.causes import Cause, causes_of
from holdfast.trace.charts import Axis, Bars, Figure, Panel
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

COLUMNS = (
    "cluster", "user", "category", "reason", "jobs", "lost_gpu_time_h", "share_of_lost_gpu_time",
)  # fmt: skip


def lost_by_person(trace: "Trace", *, top: int = 15) -> Result:
    """Chart the GPU time of failed jobs by user and cause, the largest first.

    Clusters that serve only for comparison are left out. Columns of the table: `cluster`, `user`,
    `category`, `reason`, `jobs`, `lost_gpu_time_h`, `share_of_lost_gpu_time`.

    Args:
        trace: a trace with the column `state`.
        top: the number of bars in the chart, one for each user and cause; the table has all.

    Raises:
        LeftOut: the trace has no states, or no failed job held a GPU for a known time.
    """
    trace.require("state")
    table = trace.aggregate("failure_users").where(is_gpu=True)
    causes = causes_of(table)
    held_s = np.nan_to_num(table["sum_gpu_time_s"].astype(float)).tolist()
    users = [name or UNKNOWN for name in table["username"].tolist()]
    found: dict[str, dict[tuple[str, Cause], list[float]]] = {}
    columns = (table["cluster"].tolist(), users, causes, table["n"].tolist(), held_s)
    for cluster, user, cause, jobs, seconds in zip(*columns, strict=True):
        pairs = found.setdefault(cluster, defaultdict(lambda: [0.0, 0.0]))
        pairs[user, cause][0] += float(jobs)
        pairs[user, cause][1] += seconds / 3600
    rows: list[tuple[object, ...]] = []
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for cluster in in_order(trace):
        pairs = found.get(cluster, {})
        total_h = sum(hours for _, hours in pairs.values())
        if cluster in trace.compared or not total_h:
            continue
        order = sorted(pairs, key=lambda pair: (-pairs[pair][1], pair[0], pair[1].reason))
        rows += [
            (cluster, user, cause.category, cause.reason, *pairs[user, cause],
             pairs[user, cause][1] / total_h)
            for user, cause in order
        ]  # fmt: skip
        numbers[f"{slug(cluster)}.lost_to_failures.gpu_time_h"] = total_h
        numbers[f"{slug(cluster)}.lost_to_failures.jobs"] = sum(n for n, _ in pairs.values())
        panels.append(
            Bars(
                title=f"{cluster} ({total_h:,.0f} GPU-hours lost to failures)",
                value=Axis(label="GPU-hours", low=0.0),
                groups=[f"{user}: {cause.reason}" for user, cause in order[:top]],
                parts={"lost": np.array([pairs[pair][1] for pair in order[:top]])},
            )
        )
        user, cause = order[0]
        captions[cluster] = (
            f"{total_h:,.0f} GPU-hours went to jobs that failed; most, "
            f"{words.percent(pairs[order[0]][1] / total_h)}, to jobs of {user} with the cause "
            f"{cause.reason}"
        )
    if not panels:
        raise LeftOut("Left out: no failed job held a GPU for a known time.")
    return Result(
        table=Table.of_rows(COLUMNS, rows),
        chart=Figure(panels=panels, columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="lost_by_person",
        section="Failures and what they cost",
        title="Whose GPU time is lost, and why",
        run=lost_by_person,
    ),
)
