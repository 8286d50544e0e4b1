"""Return telemetry as exact distributions, and refuse a trace without telemetry."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace.analyses.selection import in_order, role
from holdfast.trace.charts import Axis, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

NO_TELEMETRY = "Left out: the trace has no telemetry."


def measured(trace: "Trace", aggregate: str) -> Table:
    """Return an aggregate of telemetry, such as `metric_values`.

    Raises:
        LeftOut: the trace has no telemetry.
    """
    if not trace.metrics:
        raise LeftOut(NO_TELEMETRY)
    return trace.aggregate(aggregate)


def distributions(trace: "Trace", metric: str) -> dict[str, Distribution]:
    """Return the distribution of a metric over all samples of each cluster.

    The clusters are in the order of the trace.

    Raises:
        LeftOut: no cluster has the metric.
    """
    table = measured(trace, "metric_values").where(metric=metric)
    if not len(table):
        raise LeftOut(f"Left out: the telemetry has no {metric}.")
    names = dict.fromkeys([*in_order(trace), *table["cluster"].tolist()])
    return {
        name: Distribution.of(rows["value"], rows["n"])
        for name in names
        if len(rows := table.where(cluster=name))
    }


def optional(trace: "Trace", metric: str) -> dict[str, Distribution]:
    """Return the distributions of a metric by cluster; empty if the telemetry lacks the metric.

    Raises:
        LeftOut: the trace has no telemetry.
    """
    measured(trace, "metric_values")
    try:
        return distributions(trace, metric)
    except LeftOut:
        return {}


def scaled(distribution: Distribution, factor: float) -> Distribution:
    """Multiply the values by a factor, to convert samples to another unit."""
    return Distribution(distribution.values * factor, distribution.weights)


def over(distribution: Distribution, value: float) -> float:
    """Return the share of samples above `value`, 0 to 1."""
    return float(1 - distribution.at_most(value))


def cdf(
    trace: "Trace",
    title: str,
    axis: Axis,
    curves: Mapping[tuple[str, str], Distribution],
    *,
    unit: str,
) -> tuple[Lines, Table]:
    """Return a panel and a table of empirical CDFs.

    Args:
        trace: the trace, which defines the clusters that serve only for comparison.
        title: the title of the panel.
        axis: the axis of the values.
        curves: the distributions by cluster and metric.
        unit: the unit of the values, used in the name of the table's column, such as `value_pct`.
    """
    series, parts = [], []
    many = len({metric for _, metric in curves}) > 1
    for (cluster, metric), distribution in curves.items():
        x, share = distribution.curve()
        label = f"{cluster} {metric}" if many else cluster
        series.append(
            Series(
                label=f"{label} (n = {distribution.total:,.0f})",
                x=np.append(x[0], x),
                y=np.append(0.0, share),
                style="step",
                role=role(trace, cluster),
            )
        )
        parts.append(
            Table(
                {
                    "cluster": np.array([cluster] * len(x), dtype=object),
                    "part": np.array([metric] * len(x), dtype=object),
                    f"value_{unit}": x,
                    "share_at_most": share,
                }
            )
        )
    share_axis = Axis(label="share of samples at most x", low=0.0, high=1.0)
    return Lines(title=title, x=axis, y=share_axis, series=series), stacked(parts)


def stacked(tables: Sequence[Table]) -> Table:
    """Concatenate tables that have the same columns."""
    return Table(
        {name: np.concatenate([table[name] for table in tables]) for name in tables[0].columns}
    )


def sentences(words: Mapping[str, str]) -> str:
    """Join the texts of the clusters to `Seren: …; Kalos: ….`.

    A single text is returned without the name of its cluster.
    """
    if len(words) == 1:
        (only,) = words.values()
        return f"{only[:1].upper()}{only[1:]}."
    return "; ".join(f"{cluster}: {phrase}" for cluster, phrase in words.items()) + "."
