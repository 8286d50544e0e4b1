"""Analyze the power of GPUs and servers: the study's Fig 8 and Fig 9."""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace.analyses.measured import cdf, distributions, optional, over, sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import slug
from holdfast.trace.charts import Axis, Bars, Figure
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.distribution import Distribution
    from holdfast.trace.trace import Trace

SECTION = "Power, heat and carbon"
STUDY_SHARES = {"GPUs": 2 / 3, "CPUs": 0.112, "PSU": 0.096}
"""Shares of a GPU server's power in the study (Fig 9).

Memory, fans, drives and mainboard draw the rest.
"""


def gpu_power(trace: "Trace", *, idle_w: float = 70.0) -> Result:
    """Chart the CDF of GPU power, with the idle share and the share above the rated power.

    The chart is the study's Fig 8a. An idle A100 draws about 60 W, and single GPUs 55 to 69 W. In
    the study's released data, 30% of samples are at most 70 W, which is the share that the study
    calls idle.

    Args:
        trace: a trace with the metric POWER_USAGE. The rated power is `Cluster.gpu_tdp_w`.
        idle_w: a GPU counts as idle up to this power, in watts.

    Raises:
        LeftOut: the trace has no telemetry of POWER_USAGE.
    """
    found = distributions(trace, "POWER_USAGE")
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for cluster, power in found.items():
        key = f"{slug(cluster)}.gpu_power"
        idle = float(power.at_most(idle_w))
        numbers |= {
            f"{key}.mean_w": power.mean,
            f"{key}.median_w": power.median,
            f"{key}.idle_share": idle,
        }
        captions[cluster] = (
            f"mean {power.mean:,.0f} W, {idle:.1%} of the samples idle (at most {idle_w:g} W)"
        )
        known = trace.clusters.get(cluster)
        if known and known.gpu_tdp_w:
            numbers[f"{key}.over_tdp_share"] = over(power, known.gpu_tdp_w)
            captions[cluster] += (
                f", {over(power, known.gpu_tdp_w):.1%} above the rated {known.gpu_tdp_w:g} W"
            )
    panel, table = cdf(
        trace,
        "GPU power",
        Axis(label="GPU power (W)", low=0.0),
        {(c, "POWER_USAGE"): d for c, d in found.items()},
        unit="w",
    )
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def server_power(trace: "Trace") -> Result:
    """Chart the CDF of the power of GPU and CPU servers, and the ratio of their means (Fig 8b).

    Samples below 1 W are dropped, because they mean that the server's management board did not
    answer.

    Raises:
        LeftOut: the trace has no telemetry of server power.
    """
    curves: dict[tuple[str, str], Distribution] = {}
    for kind in ("GPU", "CPU"):
        found = optional(trace, f"{kind}_SERVER_POWER")
        curves |= {(cluster, f"{kind} server"): power for cluster, power in found.items()}
    if not curves:
        raise LeftOut(
            "Left out: the telemetry has no power of servers (GPU_SERVER_POWER, CPU_SERVER_POWER)."
        )
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for (cluster, kind), power in curves.items():
        numbers[f"{slug(cluster)}.{slug(kind)}_power.mean_w"] = power.mean
        numbers[f"{slug(cluster)}.{slug(kind)}_power.median_w"] = power.median
        words = f"a {kind} draws {power.mean:,.0f} W in the mean"
        captions[cluster] = f"{captions[cluster]}, {words}" if cluster in captions else words
    for cluster in captions:
        gpu, cpu = (
            numbers.get(f"{slug(cluster)}.{kind}_server_power.mean_w") for kind in ("gpu", "cpu")
        )
        if gpu and cpu:
            numbers[f"{slug(cluster)}.server_power.gpu_to_cpu"] = gpu / cpu
            captions[cluster] += f": {gpu / cpu:.1f} times as much"
    panel, table = cdf(
        trace, "Server power", Axis(label="server power (W)", low=0.0), curves, unit="w"
    )
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def power_breakdown(trace: "Trace") -> Result:
    """Chart how much of a GPU server's power its GPUs draw, beside the study's shares (Fig 9).

    The GPUs' share is GPUs per node times mean POWER_USAGE, divided by mean GPU_SERVER_POWER. Both
    means are over all samples.

    Raises:
        LeftOut: no cluster has both metrics and a number of GPUs per node.
    """
    servers = distributions(trace, "GPU_SERVER_POWER")
    gpus = distributions(trace, "POWER_USAGE")
    rows, numbers, captions = [], {}, {}
    parts: dict[str, dict[str, float]] = {}
    for cluster in servers:
        known = trace.clusters.get(cluster)
        if cluster not in gpus or not known or not known.gpus_per_node:
            continue
        server_w, gpus_w = servers[cluster].mean, known.gpus_per_node * gpus[cluster].mean
        share = gpus_w / server_w
        parts[cluster] = {"GPUs": share, "the rest": 1 - share}
        rows += [
            (cluster, "GPUs", gpus_w, share),
            (cluster, "the rest", server_w - gpus_w, 1 - share),
        ]
        numbers[f"{slug(cluster)}.server_power.gpu_share"] = share
        captions[cluster] = (
            f"the {known.gpus_per_node} GPUs draw {gpus_w:,.0f} of a server's {server_w:,.0f} W in "
            "the mean "
            f"({share:.0%}; the study: {STUDY_SHARES['GPUs']:.0%})"
        )
    if not rows:
        raise LeftOut(
            "Left out: no cluster has the power of GPUs and of servers, and a number of GPUs a "
            "node."
        )
    parts["the study"] = {**STUDY_SHARES, "the rest": 1 - sum(STUDY_SHARES.values())}
    rows += [("the study", part, np.nan, share) for part, share in parts["the study"].items()]
    names = [*STUDY_SHARES, "the rest"]
    chart = Bars(
        title="Power of a GPU server",
        value=Axis(label="share of the server's power", low=0.0, high=1.0),
        groups=list(parts),
        parts={
            name: np.array([shares.get(name, 0.0) for shares in parts.values()]) for name in names
        },
        stacked=True,
    )
    return Result(
        table=Table.of_rows(("cluster", "part", "power_w", "share"), rows),
        chart=Figure(panels=[chart], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


ANALYSES = (
    Analysis(name="gpu_power", section=SECTION, title="GPU power", run=gpu_power, source="Fig 8a"),
    Analysis(
        name="server_power",
        section=SECTION,
        title="Server power",
        run=server_power,
        source="Fig 8b",
    ),
    Analysis(
        name="power_breakdown",
        section=SECTION,
        title="Where a server's power goes",
        run=power_breakdown,
        source="Fig 9",
    ),
)
