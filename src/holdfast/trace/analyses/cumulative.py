"""Build panels and tables of empirical CDFs over groups of jobs.

Each CDF is weighted by jobs or by GPU time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from holdfast.trace.analyses.selection import slug
from holdfast.trace.charts import Axis, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Weight = Literal["jobs", "gpu_time"]
BOTH: tuple[Weight, ...] = ("jobs", "gpu_time")
OF = {"jobs": "jobs", "gpu_time": "GPU time"}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Count jobs and GPU time (s) at each value of a quantity, over a group of jobs."""

    jobs: Distribution
    gpu_time: Distribution

    def under(self, weight: Weight) -> Distribution:
        """Return the distribution weighted by jobs or by GPU time."""
        return self.jobs if weight == "jobs" else self.gpu_time


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of jobs that makes one curve: the jobs of a cluster, or a part of them."""

    label: str
    cluster: str
    counted: Counted
    part: str = ""
    role: Literal["main", "compared"] = "main"


def counted(
    trace: "Trace", aggregate: str, column: str, where: str = "TRUE", parameters: Sequence[Any] = ()
) -> Counted:
    """Return the value counts of `column` in the rows of an aggregate that satisfy `where`.

    The aggregate has the columns `n` and `sum_gpu_time_s`.
    """
    table = trace.query(
        f"SELECT {column} AS x, sum(n)::DOUBLE AS n, sum(sum_gpu_time_s)::DOUBLE AS gpu_time_s "
        f"FROM {trace.prepare(aggregate)} WHERE {where} AND {column} IS NOT NULL GROUP BY ALL",
        parameters,
    )
    return Counted(
        jobs=Distribution.of(table["x"], table["n"]),
        gpu_time=Distribution.of(table["x"], table["gpu_time_s"]),
    )


def cdf_panel(
    groups: Sequence[Group], *, x: Axis, weight: Weight = "jobs", title: str = "", of: str = ""
) -> Lines:
    """Return a panel with the CDF of each group whose total weight is positive.

    Values below the low end of the axis are drawn at that end. The legend shows the number of jobs
    of each group, or its GPU time in hours.

    Args:
        groups: the groups of jobs.
        x: the axis of the values.
        weight: the weight of the CDF, jobs or GPU time.
        title: the title of the panel.
        of: a noun for the counted things in the axis label, if they are not jobs.
    """
    low = x.low if x.low is not None else -np.inf
    series = []
    for group in groups:
        distribution = group.counted.under(weight)
        if distribution.total == 0:
            continue
        values, shares = distribution.curve(log=x.scale.startswith("log"))
        below = int(np.searchsorted(values, low, side="right"))
        if below:  # One vertex at the low end stands for all values up to there.
            values, shares = np.append(low, values[below:]), shares[below - 1 :]
        unit = (
            f"n = {distribution.total:,.0f}"
            if weight == "jobs"
            else f"{distribution.total / 3600:,.0f} GPU h"
        )
        series.append(
            Series(
                label=f"{group.label} ({unit})", x=values, y=shares, style="step", role=group.role
            )
        )
    return Lines(
        title=title,
        x=x,
        y=Axis(label=f"share of {of or OF[weight]} at most x", low=0.0, high=1.0),
        series=series,
    )


def cdf_table(groups: Sequence[Group], *, column: str, weights: Sequence[Weight] = BOTH) -> Table:
    """Return the vertices of the curves; each vertex lies on the exact CDF.

    Columns of the table: `cluster`, `part`, `weight`, the values under the name `column`, and
    `share_at_most`.
    """
    parts: list[tuple[Group, Weight]] = [(group, weight) for group in groups for weight in weights]
    curves = [group.counted.under(weight).curve(log=True) for group, weight in parts]
    lengths = [len(values) for values, _ in curves]
    named = {
        "cluster": [group.cluster for group, _ in parts],
        "part": [group.part for group, _ in parts],
        "weight": [weight for _, weight in parts],
    }
    return Table(
        {name: np.repeat(np.array(cells, dtype=object), lengths) for name, cells in named.items()}
        | {
            column: np.concatenate([np.empty(0), *(values for values, _ in curves)]),
            "share_at_most": np.concatenate([np.empty(0), *(shares for _, shares in curves)]),
        }
    )


def headline(group: Group, quantity: str, *, kind: str) -> dict[str, float]:
    """Return the main statistics of a group of jobs, for the named numbers.

    These are the number of jobs n, the mean, median, p90, p95 and maximum over jobs, and the median
    over GPU time. Keys are `CLUSTER.KIND.STATISTIC_QUANTITY`, such as
    `seren.gpu_job.median_duration_s`. `quantity` includes the unit.
    """
    jobs, key = group.counted.jobs, f"{slug(group.cluster)}.{slug(kind)}"
    numbers = {
        f"{key}.n_with_{quantity}": jobs.total,
        f"{key}.mean_{quantity}": jobs.mean,
        f"{key}.median_{quantity}": jobs.median,
        f"{key}.p90_{quantity}": float(jobs.quantile(0.9)),
        f"{key}.p95_{quantity}": float(jobs.quantile(0.95)),
        f"{key}.max_{quantity}": float(jobs.values[-1]),
    }
    if group.counted.gpu_time.total > 0:
        numbers[f"{key}.gpu_time_median_{quantity}"] = group.counted.gpu_time.reached(0.5)
    return numbers
