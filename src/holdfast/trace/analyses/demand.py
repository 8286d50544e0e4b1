"""Analyze which resources jobs request: GPUs, and CPUs and memory per GPU."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.trace.analyses.cumulative import BOTH, Group, cdf_panel, cdf_table, counted
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
from holdfast.trace.charts import Axis, Boxes, Figure, Lines
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

LARGE_GPUS = 256
"""The study calls a job large from this number of GPUs on (section 3.1)."""
FIVE = ("whisker_low", "q1", "median", "q3", "whisker_high")


def gpu_demand(trace: "Trace", *, large_gpus: int = LARGE_GPUS) -> Result:
    """Chart the CDF of GPUs per job, weighted by jobs (study: Fig 3a) and by GPU time (Fig 3b).

    All clusters share a panel. Columns of the table: `cluster`, `part`, `weight`, `gpu_num`,
    `share_at_most`.

    Args:
        trace: the trace.
        large_gpus: the caption and the numbers call a job large from this number of GPUs on.

    Raises:
        LeftOut: the trace has no GPU job.
    """
    groups = [
        Group(
            label=cluster,
            cluster=cluster,
            counted=counted(trace, "job_counts", "gpu_num", "cluster = ? AND is_gpu", [cluster]),
            role=role(trace, cluster),
        )
        for cluster in in_order(trace)
    ]
    groups = [group for group in groups if group.counted.jobs.total > 0]
    some(groups, "the trace has no GPU job")
    numbers: dict[str, float] = {}
    sentences = []
    for group in groups:
        jobs, time, key = (
            group.counted.jobs,
            group.counted.gpu_time,
            f"{slug(group.cluster)}.gpu_job",
        )
        one = [float(distribution.at_most(1.0)) for distribution in (jobs, time)]
        large = [
            1.0 - float(distribution.at_most(np.nextafter(large_gpus, 0)))
            for distribution in (jobs, time)
        ]
        numbers |= {
            f"{key}.mean_gpu_num": jobs.mean,
            f"{key}.median_gpu_num": jobs.median,
            f"{key}.max_gpu_num": float(jobs.values[-1]),
            f"{key}.share_of_jobs_at_most_1_gpu": one[0],
            f"{key}.share_of_jobs_from_{large_gpus}_gpus": large[0],
        }
        sentence = f"{group.cluster}: {one[0]:.1%} of {jobs.total:,.0f} GPU jobs have at most 1 GPU"
        if time.total > 0:
            numbers[f"{key}.share_of_gpu_time_at_most_1_gpu"] = one[1]
            numbers[f"{key}.share_of_gpu_time_from_{large_gpus}_gpus"] = large[1]
            sentence += (
                f" and take {one[1]:.1%} of the GPU time; those of {large_gpus} and more "
                f"({large[0]:.1%} of jobs) "
                f"take {large[1]:.1%}"
            )
        sentences.append(sentence + ".")
    axis = Axis(label="GPUs per job", scale="log2")
    return Result(
        table=cdf_table(groups, column="gpu_num"),
        chart=Figure(panels=[cdf_panel(groups, x=axis, weight=weight) for weight in BOTH]),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def gpu_demand_by_type(trace: "Trace") -> Result:
    """Chart box plots of GPUs per job by workload type (study: Fig 5).

    The whiskers end at the furthest value within 1.5 IQR of the box. There is one panel per
    cluster. Columns of the table: `cluster`, `type`, `n`, and the five numbers of the box.

    Raises:
        LeftOut: no cluster has job types.
    """
    trace.require("type")
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        kept: list[tuple[str, float, Values]] = []
        for kind in _types(trace, cluster):
            where, parameters = (
                f"cluster = ? AND is_gpu AND coalesce(type, '{UNKNOWN}') = ?",
                [cluster, kind],
            )
            jobs = counted(trace, "job_counts", "gpu_num", where, parameters).jobs
            kept.append((kind, jobs.total, jobs.box()))
        shown = [each for each in kept if named([each[0]])]
        if not shown:
            continue
        rows += [(cluster, kind, n, *five.tolist()) for kind, n, five in kept]
        numbers |= {
            f"{slug(cluster)}.{slug(kind)}.{name}_gpu_num": float(value)
            for kind, _, five in kept
            for name, value in zip(FIVE, five.tolist(), strict=True)
        }
        panels.append(
            Boxes(
                title=cluster,
                value=Axis(label="GPUs per job", scale="log2"),
                groups=[f"{kind} (n = {n:,.0f})" for kind, n, _ in kept],
                five=np.array([five for *_, five in kept]),
            )
        )
        most = max(shown, key=lambda each: float(each[2][2]))
        sentences.append(
            f"{cluster}: {most[0]} asks for most, a median of {most[2][2]:,.4g} GPUs (n = "
            f"{most[1]:,.0f})."
        )
    some(panels, "no GPU job has a type")
    return Result(
        table=Table.of_rows(("cluster", "type", "n", *FIVE), rows),
        chart=Figure(panels=panels),
        caption=" ".join(
            [
                *sentences,
                "Boxes are quartiles of jobs, whiskers the furthest within 1.5 of their range.",
            ]
        ),
        numbers=numbers,
    )


def host_demand(trace: "Trace") -> Result:
    """Chart the CDF of requested CPUs and host memory per GPU, weighted by jobs and by GPU time.

    Columns of the table: `cluster`, `part` (`CPUs` or `memory (GB)`), `weight`, `per_gpu`,
    `share_at_most`.

    Raises:
        LeftOut: no GPU job records its CPUs or its memory.
    """
    groups_of: dict[str, list[Group]] = {}
    numbers: dict[str, float] = {}
    for part, column in (("CPUs", "cpu_num_per_gpu"), ("memory (GB)", "mem_gb_per_gpu")):
        for cluster in in_order(trace):
            amounts = counted(trace, "job_host_demand", column, "cluster = ?", [cluster])
            if amounts.jobs.total > 0:
                group = Group(
                    label=cluster,
                    cluster=cluster,
                    part=part,
                    counted=amounts,
                    role=role(trace, cluster),
                )
                groups_of.setdefault(part, []).append(group)
                numbers[f"{slug(cluster)}.gpu_job.median_{column}"] = amounts.jobs.median
    some(list(groups_of), "no GPU job has a record of its CPUs or its memory")
    panels: list[Lines] = [
        cdf_panel(groups, x=Axis(label=f"{part} per GPU", scale="symlog"), weight=weight)
        for part, groups in groups_of.items()
        for weight in BOTH
    ]
    each = [
        f"{part} per GPU {group.counted.jobs.median:,.4g} in {group.cluster} (n = "
        f"{group.counted.jobs.total:,.0f})"
        for part, groups in groups_of.items()
        for group in groups
    ]
    return Result(
        table=cdf_table(
            [group for groups in groups_of.values() for group in groups], column="per_gpu"
        ),
        chart=Figure(panels=panels),
        caption=f"Medians requested by GPU jobs: {'; '.join(each)}.",
        numbers=numbers,
    )


def _types(trace: "Trace", cluster: str) -> list[str]:
    if not trace.has("type", cluster=cluster):
        return []
    found = trace.query(
        f"SELECT DISTINCT coalesce(type, '{UNKNOWN}') AS type FROM {trace.prepare('job_counts')} "
        "WHERE cluster = ? AND is_gpu",
        [cluster],
    )
    return types_in_order(found["type"].tolist())


ANALYSES = (
    Analysis(
        name="gpu_demand", section="The cluster and its jobs", title="How many GPUs jobs hold",
        run=gpu_demand, source="Fig 3",
    ),
    Analysis(
        name="gpu_demand_by_type", section="The cluster and its jobs", title="How many GPUs jobs hold, by type",
        run=gpu_demand_by_type, source="Fig 5",
    ),
    Analysis(
        name="host_demand", section="The cluster and its jobs", title="CPUs and memory beside each GPU",
        run=host_demand,
    ),
)  # fmt: skip
