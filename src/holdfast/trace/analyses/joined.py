"""Analyze how jobs used their GPUs, by joining job records with telemetry.

A job's GPUs are those that its record names. If the record names none, they are all GPUs of its
nodes, provided that the job held all of these. Other GPU jobs that shared a node are left out,
because it is unknown which GPUs they held; the caption gives their number. The CPUs and host memory
of a node count for a job that had the node to itself.
"""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.measured import NO_TELEMETRY, sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import UNKNOWN, in_order, role, slug
from holdfast.trace.charts import Axis, Bars, Figure, Lines, Panel, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

SECTION = "Utilisation"
IDLE_PCT = 5.0
"""A GPU is idle if its GPU_UTIL in % is lower; the aggregate `joined_use` uses the same limit."""
METRICS = {"GPU_UTIL": "gpu_util", "SM_ACTIVE": "sm_active"}


def job_utilisation(trace: "Trace") -> Result:
    """Chart the CDF over GPU jobs of mean GPU_UTIL and SM_ACTIVE, and the medians by type.

    The CDFs are weighted by jobs and by GPU time.

    Raises:
        LeftOut: jobs name no nodes, there is no telemetry, or the two have no node in common.
    """
    _prepare(trace)
    table = trace.query(
        "SELECT cluster, coalesce(type, ?) AS type, metric, round(sum_value / n, 1) AS mean_pct, "
        "count(*)::DOUBLE AS jobs, sum(gpu_num * epoch(end_at - start_at) / 3600) AS gpu_time_h "
        "FROM agg_joined_use WHERE metric IN ('GPU_UTIL', 'SM_ACTIVE') GROUP BY ALL ORDER BY ALL",
        [UNKNOWN],
    )
    if not len(table):
        raise LeftOut("Left out: the telemetry of jobs has neither GPU_UTIL nor SM_ACTIVE.")
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for weight, what in (("jobs", "jobs"), ("gpu_time_h", "GPU time")):
        series = []
        for cluster in in_order(trace):
            for metric, name in METRICS.items():
                own = table.where(cluster=cluster, metric=metric)
                if not len(own):
                    continue
                use = Distribution.of(own["mean_pct"], own[weight])
                x, y = use.curve()
                size = f"n = {use.total:,.0f}" if weight == "jobs" else f"{use.total:,.0f} GPU h"
                series.append(
                    Series(
                        label=f"{cluster} {metric} ({size})",
                        x=x,
                        y=y,
                        style="step",
                        role=role(trace, cluster),
                    )
                )
                if weight == "jobs":
                    key = f"{slug(cluster)}.job.{name}"
                    numbers |= {f"{key}.median_pct": use.median, f"{key}.jobs": use.total}
                    numbers[f"{key}.idle_share"] = float(use.at_most(np.nextafter(IDLE_PCT, 0)))
                    for kind in dict.fromkeys(own["type"].tolist()):
                        of_it = own.where(type=kind)
                        numbers[f"{key}.{slug(kind)}.median_pct"] = Distribution.of(
                            of_it["mean_pct"], of_it["jobs"]
                        ).median
                    words = f"half of the jobs keep {metric} below {use.median:.3g}% in the mean"
                    captions[cluster] = (
                        f"{captions[cluster]}, {words}" if cluster in captions else words
                    )
        axis = Axis(label="mean of a job (%)", low=0.0, high=100.0)
        panels.append(
            Lines(
                title="Utilisation of jobs",
                x=axis,
                y=Axis(label=f"share of {what} at most x", low=0.0, high=1.0),
                series=series,
            )
        )
    return Result(
        table=table,
        chart=Figure(panels=panels),
        caption=f"{sentences(captions)} {_left_out(trace)}".strip(),
        numbers=numbers,
    )


def idle_by_user(trace: "Trace", *, top: int = 20) -> Result:
    """Chart the GPU-hours that each user held while the GPUs were idle, and jobs that used no GPU.

    A GPU is idle if its GPU_UTIL is below 5%.

    Args:
        trace: a trace whose jobs name nodes of the telemetry.
        top: the number of users shown, those with the most idle GPU-hours; the named numbers cover
            all users.

    Raises:
        LeftOut: the telemetry has no GPU_UTIL, or cannot be joined; see `job_utilisation`.
    """
    _prepare(trace)
    table = trace.query(
        "SELECT cluster, coalesce(username, ?) AS username, count(*)::DOUBLE AS jobs, "
        "count(*) FILTER (max_value < ?)::DOUBLE AS never_used, "
        "sum(gpu_num * epoch(end_at - start_at) / 3600) AS gpu_time_h, "
        "sum(gpu_num * epoch(end_at - start_at) / 3600 * n_idle / n) AS idle_gpu_time_h "
        "FROM agg_joined_use WHERE metric = 'GPU_UTIL' GROUP BY ALL ORDER BY idle_gpu_time_h DESC, "
        "username",
        [UNKNOWN, IDLE_PCT],
    )
    if not len(table):
        raise LeftOut("Left out: the telemetry of jobs has no GPU_UTIL.")
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    keep = np.zeros(len(table), dtype=bool)
    for cluster in in_order(trace):
        rows = np.flatnonzero(table["cluster"] == cluster)
        if not len(rows):
            continue
        held_h, idle_h = table["gpu_time_h"][rows].sum(), table["idle_gpu_time_h"][rows].sum()
        jobs, never = table["jobs"][rows].sum(), table["never_used"][rows].sum()
        key = f"{slug(cluster)}.allocated"
        numbers |= {
            f"{key}.idle_gpu_h": float(idle_h),
            f"{key}.idle_share": float(idle_h / held_h),
            f"{key}.never_used_jobs": float(never),
            f"{key}.never_used_share": float(never / jobs),
        }
        shown = rows[:top]
        keep[shown] = True
        captions[cluster] = (
            f"{idle_h:,.0f} of {held_h:,.0f} GPU-hours ({idle_h / held_h:.1%}) were held by jobs "
            "and idle (GPU_UTIL "
            f"below {IDLE_PCT:g}%); {never:,.0f} of {words.plainly(round(jobs), 'job')} ({never / jobs:.1%}) never "
            "used a GPU"
        )
        panels.append(
            Bars(
                title=cluster,
                value=Axis(label="GPU-hours", low=0.0),
                groups=[str(user) for user in table["username"][shown]],
                parts={
                    "idle": table["idle_gpu_time_h"][shown],
                    "in use": table["gpu_time_h"][shown] - table["idle_gpu_time_h"][shown],
                },
                stacked=True,
            )
        )
    return Result(
        table=Table({name: column[keep] for name, column in table.columns.items()}),
        chart=Figure(panels=panels),
        caption=f"{sentences(captions)} {_left_out(trace)}".strip(),
        numbers=numbers,
    )


def overallocation_by_user(trace: "Trace", *, top: int = 20) -> Result:
    """Tabulate what each user's jobs held and used: GPUs, GPU memory, CPUs and host memory.

    - `unused_gpus_share`: share of a job's GPUs that never reached 5% GPU_UTIL, weighted by GPU
      time.
    - `peak_gpu_memory_share`: largest FB_USED of a job divided by the memory of a GPU, NaN if
      unknown.
    - CPU and host memory: means over nodes that a job had to itself, in percent of the node.

    Args:
        trace: a trace whose jobs name nodes of the telemetry.
        top: the number of users shown, those with the most GPU time; the named numbers cover all
            users.

    Raises:
        LeftOut: the telemetry has no GPU_UTIL, or cannot be joined; see `job_utilisation`.
    """
    _prepare(trace)
    memory = {
        name: cluster.gpu_memory_mib
        for name, cluster in trace.clusters.items()
        if cluster.gpu_memory_mib
    }
    users = trace.query(
        """
        WITH used AS (SELECT *, gpu_num * epoch(end_at - start_at) / 3600 AS gpu_time_h FROM agg_joined_use)
        SELECT
            cluster,
            coalesce(username, ?) AS username,
            sum(gpu_time_h) FILTER (metric = 'GPU_UTIL') AS gpu_time_h,
            sum(gpu_time_h * n_unused / n_devices) FILTER (metric = 'GPU_UTIL') AS unused_gpu_time_h,
            sum(max_value) FILTER (metric = 'FB_USED') / count(*) FILTER (metric = 'FB_USED') AS peak_fb_mib,
            sum(sum_value) FILTER (metric = 'NODE_CPU_UTILIZATION')
                / sum(n) FILTER (metric = 'NODE_CPU_UTILIZATION') AS cpu_pct,
            sum(sum_value) FILTER (metric = 'NODE_MEMORY_UTILIZATION')
                / sum(n) FILTER (metric = 'NODE_MEMORY_UTILIZATION') AS host_memory_pct
        FROM used
        GROUP BY ALL
        HAVING gpu_time_h > 0
        ORDER BY gpu_time_h DESC, username
        """,
        [UNKNOWN],
    )
    if not len(users):
        raise LeftOut("Left out: the telemetry of jobs has no GPU_UTIL.")
    memory_mib = np.array(
        [memory.get(name, np.nan) or np.nan for name in users["cluster"].tolist()]
    )
    share = users["unused_gpu_time_h"] / users["gpu_time_h"]
    table = Table(
        {
            "cluster": users["cluster"],
            "username": users["username"],
            "gpu_time_h": users["gpu_time_h"],
            "unused_gpus_share": share,
            "peak_gpu_memory_share": users["peak_fb_mib"].astype(float) / memory_mib,
            "cpu_pct": users["cpu_pct"].astype(float),
            "host_memory_pct": users["host_memory_pct"].astype(float),
        }
    )
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    keep = np.zeros(len(table), dtype=bool)
    for cluster in in_order(trace):
        rows = np.flatnonzero(table["cluster"] == cluster)
        if not len(rows):
            continue
        held_h, unused_h = users["gpu_time_h"][rows].sum(), users["unused_gpu_time_h"][rows].sum()
        numbers[f"{slug(cluster)}.allocated.unused_gpus_share"] = float(unused_h / held_h)
        shown = rows[:top]
        keep[shown] = True
        captions[cluster] = (
            f"{unused_h / held_h:.1%} of the GPU time of jobs is of GPUs that their job never used"
        )
        panels.append(
            Bars(
                title=cluster,
                value=Axis(label="share of GPU time", low=0.0, high=1.0),
                groups=[str(user) for user in table["username"][shown]],
                parts={"GPUs never used": share[shown]},
            )
        )
    return Result(
        table=Table({name: column[keep] for name, column in table.columns.items()}),
        chart=Figure(panels=panels),
        caption=f"{sentences(captions)} {_left_out(trace)}".strip(),
        numbers=numbers,
    )


def _prepare(trace: "Trace") -> None:
    """Create the tables `agg_joined_places` and `agg_joined_use`.

    Raises:
        LeftOut: jobs and telemetry cannot be joined, so the tables would be empty.
    """
    if not trace.metrics:
        raise LeftOut(NO_TELEMETRY)
    if not _has_samples(trace):
        raise LeftOut(
            "Left out: telemetry was read into sums only; convert it to a store to join it with "
            "jobs."
        )
    if not (trace.has("nodes", "start_at", "end_at") or trace.has("gpus", "start_at", "end_at")):
        raise LeftOut(
            "Left out: jobs do not name their nodes or GPUs, so telemetry cannot be given to them."
        )
    places = trace.prepare("joined_places")
    found = trace.query(f"SELECT count(device) AS n, count(*) AS jobs FROM {places}")
    if not found["jobs"][0]:
        raise LeftOut("Left out: telemetry has none of the nodes and GPUs that jobs name.")
    if not found["n"][0]:
        raise LeftOut(
            "Left out: every GPU job shares its nodes, and telemetry cannot tell such jobs apart."
        )
    trace.prepare("joined_use")


def _has_samples(trace: "Trace") -> bool:
    found = trace.query(
        "SELECT count(*) AS n FROM information_schema.tables WHERE table_name = 'samples'"
    )
    return bool(found["n"][0])


def _left_out(trace: "Trace") -> str:
    """Return a sentence with the number of GPU jobs whose GPUs are unknown, or "" if none."""
    jobs = trace.query(
        "SELECT count(*) FILTER (how = 'shared') AS shared, count(*) AS n FROM "
        "(SELECT DISTINCT cluster, job_id, attempt, start_at, how FROM agg_joined_places WHERE how "
        "<> 'node')"
    )
    if not jobs["shared"][0]:
        return ""
    return (
        f"{jobs['shared'][0]:,} of {words.plainly(jobs['n'][0], 'GPU job')} are left out: "
        "they shared a node and do not name their GPUs."
    )


ANALYSES = (
    Analysis(
        name="job_utilisation", section=SECTION, title="Utilisation of jobs", run=job_utilisation
    ),
    Analysis(
        name="idle_by_user", section="People", title="Idle GPUs while allocated", run=idle_by_user
    ),
    Analysis(
        name="overallocation_by_user",
        section="People",
        title="Held and used",
        run=overallocation_by_user,
    ),
)
