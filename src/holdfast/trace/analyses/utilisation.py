"""Analyze hardware utilisation over all samples (study: Fig 2b and Fig 7) and over time.

Every chart names its metric. GPU_UTIL is the share of time in which at least one kernel ran, even
on a small part of the GPU. SM_ACTIVE is the share of multiprocessors that had work, so it is the
better measure of how busy a GPU is (DCGM's field definitions).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.measured import (
    cdf,
    distributions,
    measured,
    optional,
    over,
    scaled,
    sentences,
)
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, role, slug
from holdfast.trace.charts import Axis, Figure, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table
from holdfast.trace.telemetry.metrics import METRICS

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

SECTION = "Utilisation"
BUSY_PCT = 95.0
ANY_KERNEL = METRICS["GPU_UTIL"].note


def gpu_utilisation(trace: "Trace", *, busy_pct: float = BUSY_PCT) -> Result:
    """Chart the CDF of GPU_UTIL over all GPUs and samples (study: Fig 2b).

    The named numbers include the shares of idle and of busy samples.

    Args:
        trace: a trace with the metric GPU_UTIL.
        busy_pct: a GPU counts as busy from this GPU_UTIL on, in %.

    Raises:
        LeftOut: the trace has no telemetry of GPU_UTIL.
    """
    found = distributions(trace, "GPU_UTIL")
    numbers: dict[str, float] = {}
    for cluster, distribution in found.items():
        key = f"{slug(cluster)}.gpu_util"
        numbers |= _numbers(key, distribution)
        below = float(distribution.at_most(np.nextafter(busy_pct, -np.inf)))
        numbers[f"{key}.busy_share"] = 1 - below
        numbers[f"{key}.polarised_share"] = numbers[f"{key}.zero_share"] + 1 - below
    panel, table = cdf(
        trace,
        "GPU utilisation",
        _percent("GPU_UTIL"),
        {(name, "GPU_UTIL"): d for name, d in found.items()},
        unit="pct",
    )
    captions = {
        cluster: f"median {numbers[f'{slug(cluster)}.gpu_util.median_pct']:.3g}%, "
        f"{numbers[f'{slug(cluster)}.gpu_util.zero_share']:.1%} of the samples at 0 and "
        f"{numbers[f'{slug(cluster)}.gpu_util.busy_share']:.1%} at {busy_pct:g}% or more"
        for cluster in found
    }
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=f"{sentences(captions)} {ANY_KERNEL}",
        numbers=numbers,
    )


def sm_activity(trace: "Trace") -> Result:
    """Chart the CDF of SM_ACTIVE and of PIPE_TENSOR_ACTIVE (study: Fig 7a).

    Raises:
        LeftOut: the telemetry has neither metric.
    """
    return _percentages(
        trace,
        "Multiprocessor and tensor-core activity",
        {"SM_ACTIVE": "sm_active", "PIPE_TENSOR_ACTIVE": "tensor_active"},
        "SM_ACTIVE is the share of multiprocessors with work; PIPE_TENSOR_ACTIVE that of cycles in "
        "the tensor cores.",
    )


def memory(trace: "Trace", *, full_pct: float = 75.0) -> Result:
    """Chart the CDF of GPU memory and of host memory in use, in percent (study: Fig 7b).

    FB_USED is in MiB. It is converted to a percentage if the cluster's GPU memory is known.

    Args:
        trace: a trace with the metrics FB_USED or NODE_MEMORY_UTILIZATION.
        full_pct: the named number `over_share` is the share of samples above this percentage.

    Raises:
        LeftOut: the telemetry has neither metric.
    """
    curves: dict[tuple[str, str], Distribution] = {}
    for cluster, used in optional(trace, "FB_USED").items():
        known = trace.clusters.get(cluster)
        if known and known.gpu_memory_mib:
            curves[cluster, "FB_USED"] = scaled(used, 100 / known.gpu_memory_mib)
    curves |= {
        (cluster, "host memory"): used
        for cluster, used in optional(trace, "NODE_MEMORY_UTILIZATION").items()
    }
    if not curves:
        raise LeftOut(
            "Left out: the telemetry has no NODE_MEMORY_UTILIZATION, and no FB_USED of GPUs whose "
            "memory is known."
        )
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for (cluster, metric), used in curves.items():
        key = f"{slug(cluster)}.{'gpu_memory' if metric == 'FB_USED' else 'host_memory'}"
        numbers |= _numbers(key, used)
        numbers[f"{key}.over_share"] = over(used, full_pct)
        numbers[f"{key}.over_half_share"] = over(used, 50.0)
        what = "GPU" if metric == "FB_USED" else "host"
        words = (
            f"median {used.median:.3g}% of {what} memory, above {full_pct:g}% in "
            f"{over(used, full_pct):.1%}"
        )
        captions[cluster] = f"{captions[cluster]}, {words}" if cluster in captions else words
    panel, table = cdf(trace, "Memory in use", _percent("memory in use"), curves, unit="pct")
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def cpu(trace: "Trace") -> Result:
    """Chart the CDF of the CPU utilisation of nodes, NODE_CPU_UTILIZATION (study: Fig 7c).

    Raises:
        LeftOut: the trace has no telemetry of this metric.
    """
    return _percentages(
        trace,
        "CPU utilisation",
        {"NODE_CPU_UTILIZATION": "cpu"},
        "NODE_CPU_UTILIZATION, over all threads of a node.",
    )


def network(trace: "Trace", *, idle_share: float = 0.01, heavy_share: float = 0.25) -> Result:
    """Chart the CDF of InfiniBand traffic as a share of the observed maximum (study: Fig 7d).

    Sending and receiving are separate curves. The study's released data are counters without a
    stated unit, so the study divides by their maximum, and this chart does the same.

    Args:
        trace: a trace with the metrics NODE_IB_SEND or NODE_IB_RECEIVE.
        idle_share: traffic up to this share of the maximum counts as idle.
        heavy_share: traffic above this share of the maximum counts as heavy.

    Raises:
        LeftOut: the telemetry has neither metric.
    """
    curves = {}
    for metric in ("NODE_IB_SEND", "NODE_IB_RECEIVE"):
        for cluster, rate in optional(trace, metric).items():
            if rate.values[-1] > 0:
                curves[cluster, metric] = scaled(rate, 100 / float(rate.values[-1]))
    if not curves:
        raise LeftOut(
            "Left out: the telemetry has no InfiniBand traffic (NODE_IB_SEND, NODE_IB_RECEIVE)."
        )
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for (cluster, metric), rate in curves.items():
        key = f"{slug(cluster)}.{metric.lower().removeprefix('node_')}"
        numbers |= {
            f"{key}.idle_share": float(rate.at_most(100 * idle_share)),
            f"{key}.heavy_share": over(rate, 100 * heavy_share),
        }
        captions[cluster] = (
            f"idle (at most {idle_share:.0%} of the greatest) in "
            f"{numbers[f'{key}.idle_share']:.1%} of the samples, "
            f"above {heavy_share:.0%} in {numbers[f'{key}.heavy_share']:.1%}"
        )
    panel, table = cdf(
        trace, "InfiniBand traffic", _percent("traffic, of the greatest seen"), curves, unit="pct"
    )
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def utilisation_over_time(trace: "Trace", *, metric: str = "GPU_UTIL") -> Result:
    """Chart the hourly mean of a metric, and the share of its samples that are 0 (idle).

    Args:
        trace: a trace with the metric.
        metric: name of a metric that is a percentage of a GPU or a node.

    Raises:
        LeftOut: the trace has no telemetry of this metric.
    """
    table, found = _hours(trace, metric)
    series, idle, numbers, captions = [], [], {}, {}
    for cluster, rows in found.items():
        seconds = rows["hour"].astype("datetime64[s]").astype(float)
        series.append(
            Series(label=cluster, x=seconds, y=rows["mean_pct"], role=role(trace, cluster))
        )
        idle.append(
            Series(label=cluster, x=seconds, y=rows["zero_share"], role=role(trace, cluster))
        )
        low, high = np.quantile(rows["mean_pct"], [0.05, 0.95])
        numbers[f"{slug(cluster)}.{metric.lower()}.hourly_p5_pct"] = float(low)
        numbers[f"{slug(cluster)}.{metric.lower()}.hourly_p95_pct"] = float(high)
        captions[cluster] = (
            f"nine hours of ten average between {low:.3g} and {high:.3g}% ({words.plainly(len(rows), 'hour')})"
        )
    time = Axis(label="UTC", scale="time")
    panels = [
        Lines(title=f"{metric}, hourly mean", x=time, y=_percent(metric), series=series),
        Lines(
            title=f"{metric} = 0",
            x=time,
            y=Axis(label="share of samples at 0", low=0.0, high=1.0),
            series=idle,
        ),
    ]
    note = f" {ANY_KERNEL}" if metric == "GPU_UTIL" else ""
    return Result(
        table=table,
        chart=Figure(panels=panels, columns=1),
        caption=f"{metric}: {sentences(captions)}{note}",
        numbers=numbers,
    )


def idle_by_hour_of_day(trace: "Trace", *, metric: str = "GPU_UTIL") -> Result:
    """Chart the share of samples at 0 by local hour of the day.

    Args:
        trace: a trace with the metric.
        metric: name of a metric that is a percentage of a GPU or a node.

    Raises:
        LeftOut: the trace has no telemetry of this metric.
    """
    _, found = _hours(trace, metric)
    series, parts, numbers, captions = [], [], {}, {}
    for cluster, rows in found.items():
        known = trace.clusters.get(cluster)
        offset_h = known.utc_offset_h if known else 0.0
        hour = (rows["hour"].astype("datetime64[s]").astype(float) / 3600 + offset_h) % 24
        of_day = np.floor(hour).astype(int)
        n = np.bincount(of_day, weights=rows["n"], minlength=24)
        with np.errstate(invalid="ignore"):
            share = np.bincount(of_day, weights=rows["n"] * rows["zero_share"], minlength=24) / n
        series.append(Series(label=cluster, x=np.arange(24.0), y=share, role=role(trace, cluster)))
        parts += [
            (cluster, hour_of_day, *row)
            for hour_of_day, row in enumerate(zip(n, share, strict=True))
        ]
        least, most = int(np.nanargmin(share)), int(np.nanargmax(share))
        numbers[f"{slug(cluster)}.{metric.lower()}.idle_most_share"] = float(share[most])
        numbers[f"{slug(cluster)}.{metric.lower()}.idle_least_share"] = float(share[least])
        captions[cluster] = (
            f"idle most at {most:02d}:00 ({share[most]:.1%} of samples), least at {least:02d}:00 "
            f"({share[least]:.1%})"
        )
    chart = Lines(
        title=f"{metric} = 0 by hour of the day",
        x=Axis(label="hour of the day (local)", low=0.0, high=23.0),
        y=Axis(label="share of samples at 0", low=0.0),
        series=series,
    )
    return Result(
        table=Table.of_rows(("cluster", "hour_of_day", "samples", "zero_share"), parts),
        chart=Figure(panels=[chart], columns=1),
        caption=f"{metric}: {sentences(captions)}",
        numbers=numbers,
    )


def _hours(trace: "Trace", metric: str) -> tuple[Table, dict[str, Table]]:
    """Return the hourly means of a metric, as one table and by cluster."""
    hours = measured(trace, "metric_hours").where(metric=metric)
    if not len(hours):
        raise LeftOut(f"Left out: the telemetry has no {metric}.")
    order = np.lexsort(
        [hours["hour"].astype("datetime64[s]").astype(np.int64), hours["cluster"].astype(str)]
    )
    hours = Table({name: column[order] for name, column in hours.columns.items()})
    table = Table(
        {
            "cluster": hours["cluster"],
            "hour": hours["hour"],
            "n": hours["n"].astype(float),
            "mean_pct": hours["sum_value"] / hours["n"],
            "zero_share": hours["n_zero"] / hours["n"],
        }
    )
    names = dict.fromkeys([*in_order(trace), *table["cluster"].tolist()])
    return table, {name: rows for name in names if len(rows := table.where(cluster=name))}


def _percentages(trace: "Trace", title: str, metrics: Mapping[str, str], note: str) -> Result:
    """Chart CDFs of percentages. `metrics` maps each metric to its name in the keys of numbers."""
    curves = {
        (cluster, metric): distribution
        for metric in metrics
        for cluster, distribution in optional(trace, metric).items()
    }
    if not curves:
        raise LeftOut(f"Left out: the telemetry has no {' and no '.join(metrics)}.")
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for (cluster, metric), distribution in curves.items():
        numbers |= _numbers(f"{slug(cluster)}.{metrics[metric]}", distribution)
        words = f"{metric} median {distribution.median:.3g}%"
        captions[cluster] = f"{captions[cluster]}, {words}" if cluster in captions else words
    panel, table = cdf(trace, title, _percent("share of time"), curves, unit="pct")
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=f"{sentences(captions)} {note}",
        numbers=numbers,
    )


def _numbers(key: str, distribution: Distribution) -> dict[str, float]:
    return {
        f"{key}.median_pct": distribution.median,
        f"{key}.mean_pct": distribution.mean,
        f"{key}.zero_share": float(distribution.at_most(0.0)),
        f"{key}.samples": distribution.total,
    }


def _percent(label: str) -> Axis:
    return Axis(label=f"{label} (%)", low=0.0, high=100.0)


ANALYSES = (
    Analysis(
        name="gpu_utilisation",
        section=SECTION,
        title="GPU utilisation",
        run=gpu_utilisation,
        source="Fig 2b",
    ),
    Analysis(
        name="sm_activity",
        section=SECTION,
        title="SM and tensor-core activity",
        run=sm_activity,
        source="Fig 7a",
    ),
    Analysis(
        name="memory", section=SECTION, title="GPU and host memory", run=memory, source="Fig 7b"
    ),
    Analysis(name="cpu", section=SECTION, title="CPU utilisation", run=cpu, source="Fig 7c"),
    Analysis(
        name="network", section=SECTION, title="InfiniBand traffic", run=network, source="Fig 7d"
    ),
    Analysis(
        name="utilisation_over_time",
        section=SECTION,
        title="GPU utilisation over time",
        run=utilisation_over_time,
    ),
    Analysis(
        name="idle_by_hour_of_day",
        section=SECTION,
        title="Idle GPUs by hour of the day",
        run=idle_by_hour_of_day,
    ),
)
