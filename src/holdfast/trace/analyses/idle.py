"""Estimate how many GPUs are idle while a job holds them, from hourly sums.

`joined` computes the exact number, but needs the names of each job's nodes and single samples of
the telemetry. This estimate needs neither. If a share `i` of the GPUs is idle in an hour and a
share `f` is not allocated, at least the share `i - f` is idle while allocated.
"""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.capacity import NO_TIMES, gpus_in_use
from holdfast.trace.analyses.measured import measured, sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import capacity_gpus, in_order, slug
from holdfast.trace.charts import Axis, Figure, Lines, Panel, Series
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

METRIC = "GPU_UTIL"
COLUMNS = ("cluster", "at_s", "gpus_in_use", "share_idle", "idle_gpus_at_least")
MEANING = (
    "A GPU is idle at a GPU_UTIL of 0. The telemetry is taken as a fair sample of all GPUs; jobs "
    "that are not in the records make the number too low, never too high."
)


def idle_while_allocated(trace: "Trace") -> Result:
    """Chart GPUs in use over time, and a lower bound for how many of them are idle.

    Clusters that serve only for comparison are left out. Columns of the table: `cluster`, `at_s`
    (start of the hour), `gpus_in_use`, `share_idle` (of all measured GPUs), `idle_gpus_at_least`.

    Raises:
        LeftOut: there is no telemetry of GPU_UTIL, no job has times, the number of GPUs is unknown,
            or telemetry and jobs have no hour in common.
    """
    hours = measured(trace, "metric_hours").where(metric=METRIC)
    if not len(hours):
        raise LeftOut(f"Left out: the telemetry has no {METRIC}.")
    rows: list[tuple[object, ...]] = []
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    why = NO_TIMES
    for cluster in in_order(trace):
        own = hours.where(cluster=cluster)
        if not len(own) or cluster in trace.compared:
            continue
        if (gpus := capacity_gpus(trace, cluster)) is None:
            why = "the number of GPUs is unknown; give it by --capacity"
            continue
        first, by_type = gpus_in_use(trace, cluster)
        if not by_type:
            continue
        total = np.sum(list(by_type.values()), axis=0)
        at = own["hour"].astype("datetime64[h]").astype(np.int64) - first
        kept = (at >= 0) & (at < len(total)) & (own["n"] > 0)
        if not kept.any():
            why = "the telemetry and the jobs have no hour in common"
            continue
        order = np.argsort(at[kept])
        at = at[kept][order]
        held = np.minimum(total[at], gpus)
        idle = (own["n_zero"][kept] / own["n"][kept])[order]
        least = np.clip(idle * gpus - (gpus - held), 0.0, held)
        at_s = ((first + at) * 3600.0).astype(np.float64)
        rows += [
            (cluster, *row)
            for row in zip(at_s.tolist(), held.tolist(), idle.tolist(), least.tolist(), strict=True)
        ]
        key = f"{slug(cluster)}.allocated_idle"
        share = float(least.sum() / max(held.sum(), 1e-300))
        numbers |= {
            f"{key}.gpu_h_at_least": float(least.sum()),
            f"{key}.share_at_least": share,
            f"{key}.hours": float(len(at)),
        }
        captions[cluster] = (
            f"at least {words.percent(share)} of the allocated GPUs, {least.sum():,.0f} GPU-hours, "
            f"are idle over {words.plainly(len(at), 'hour')}"
        )
        panels.append(
            Lines(
                title=f"{cluster}, hourly means",
                x=Axis(label="time (UTC)", scale="time"),
                y=Axis(label="GPUs", low=0.0),
                series=[
                    Series(label="held by jobs", x=at_s, y=held),
                    Series(label="of these idle, at least", x=at_s, y=least),
                ],
            )
        )
    if not panels:
        raise LeftOut(f"Left out: {why}.")
    return Result(
        table=Table.of_rows(COLUMNS, rows),
        chart=Figure(panels=panels, columns=1),
        caption=f"{sentences(captions)} {MEANING}",
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="idle_while_allocated",
        section="Utilisation",
        title="Idle GPUs while allocated, at least",
        run=idle_while_allocated,
    ),
)
