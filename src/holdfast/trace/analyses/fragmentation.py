"""Analyze how scattered the free GPUs are over the nodes.

The measures are the number of partly used nodes, their free GPUs, and the largest job that fits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.capacity import last_submission_hour
from holdfast.trace.analyses.hourly import coarser, starts_s, step_for
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, slug, some
from holdfast.trace.charts import Axis, Figure, Lines, Series
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The state of a cluster's nodes at each whole hour; each array has the shape (hours,)."""

    first_hour: int
    """First hour, counted from the Unix epoch."""
    nodes: float
    partly_used: Values
    """Number of nodes with some GPUs in use and some free."""
    free_on_partly_used: Values
    """Number of free GPUs on the partly used nodes."""
    free_nodes: Values
    """Number of nodes with no GPU in use."""
    largest_fit: Values
    """Number of GPUs of the largest job that would fit.

    Such a job gets all GPUs of the free nodes together, or the free GPUs of one node.
    """


def placement(trace: "Trace", cluster: str) -> Placement | None:
    """Compute the state of the nodes at every whole hour, from first start to last submission.

    A node has `gpus_per_node` GPUs. If this number is unknown, a node has as many as it ever had in
    use at once. A job's GPUs are spread evenly over its nodes. Nodes that no job holds at any whole
    hour are free. They can only be counted if the cluster's `node_num` is known.

    Returns:
        The state of the nodes, or None if no job names its nodes.
    """
    known = trace.clusters[cluster]
    # Count, for each hour, the nodes that enter and leave each number of used GPUs. Rows without an
    # hour count the nodes of each size. The result has few rows for any number of nodes.
    table = trace.query(
        f"""
        WITH used AS (
            SELECT node, hour, round(sum(sum_step) OVER (PARTITION BY node ORDER BY hour), 3) AS used
            FROM {trace.prepare("node_hours")} WHERE cluster = ?
        ),
        sized AS MATERIALIZED (
            SELECT *, coalesce(?, max(used) OVER (PARTITION BY node))::DOUBLE AS size,
                coalesce(lag(used) OVER (PARTITION BY node ORDER BY hour), 0) AS before
            FROM used
        ),
        moved AS (
            SELECT hour, size, used, 1 AS nodes FROM sized
            UNION ALL SELECT hour, size, before, -1 FROM sized
            UNION ALL SELECT NULL, size, 0, 1 FROM (SELECT DISTINCT node, size FROM sized)
        )
        SELECT hour, size, used, sum(nodes)::DOUBLE AS nodes FROM moved GROUP BY ALL
        """,
        [cluster, known.gpus_per_node],
    )
    if not len(table):
        return None
    counts, moves = (_rows(table, of) for of in (np.isnan(table["hour"]), ~np.isnan(table["hour"])))
    sizes = {
        float(size): float(nodes)
        for size, nodes in zip(counts["size"], counts["nodes"], strict=True)
    }
    if known.node_num is not None:
        most = max(sizes)
        sizes[most] += max(0.0, known.node_num - sum(sizes.values()))
    first = int(moves["hour"].min())
    hours = int(moves["hour"].max()) - first + 1
    partly, free_partly, free_nodes, free_whole, block = (np.zeros(hours) for _ in range(5))
    levels = {
        (float(size), float(used)) for size, used in zip(moves["size"], moves["used"], strict=True)
    }
    for size, used in levels | {(size, 0.0) for size in sizes}:
        rows = moves.where(size=size, used=used)
        change = np.bincount(
            rows["hour"].astype(np.int64) - first, weights=rows["nodes"], minlength=hours
        )
        count = np.cumsum(change) + (sizes[size] if used == 0 else 0.0)
        free = max(size - used, 0.0)
        if used <= 0:
            free_nodes += count
            free_whole += count * size
        elif free > 0:
            partly += count
            free_partly += count * free
        block = np.maximum(block, np.where(count > 0, free, 0.0))
    kept = slice(0, max(1, last_submission_hour(trace, cluster, first + hours - 1) - first + 1))
    return Placement(
        first_hour=first,
        nodes=sum(sizes.values()),
        partly_used=partly[kept],
        free_on_partly_used=free_partly[kept],
        free_nodes=free_nodes[kept],
        largest_fit=np.maximum(free_whole, block)[kept],
    )


def _rows(table: Table, kept: npt.NDArray[np.bool_]) -> Table:
    return Table({name: column[kept] for name, column in table.columns.items()})


def fragmentation(trace: "Trace", *, points: int = 1000) -> Result:
    """Chart partly used nodes, their free GPUs, and the largest job that would fit, at whole hours.

    Columns of the table: `cluster`, `at_s` (Unix epoch), `share_of_nodes_partly_used`,
    `free_gpus_on_partly_used_nodes`, `largest_fit_gpus`. If there are more hours than `points`,
    each value is the mean of several hours.

    Raises:
        LeftOut: no cluster records the nodes of its jobs.
    """
    trace.require("nodes")
    tables, panels, sentences = [], [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        found = placement(trace, cluster) if trace.has("nodes", cluster=cluster) else None
        if found is None:
            continue
        step = step_for(len(found.partly_used), points)
        at_s = starts_s(found.first_hour, len(found.partly_used), step)
        share = found.partly_used / found.nodes
        shown = [
            coarser(values, step)
            for values in (share, found.free_on_partly_used, found.largest_fit)
        ]
        tables.append((np.full(len(at_s), cluster, object), at_s, *shown))
        labels = (
            "share of nodes partly used",
            "GPUs free on partly used nodes",
            "GPUs of the largest job that fits",
        )
        panels += [
            Lines(
                title=f"{cluster} ({words.plainly(round(found.nodes), 'node')})",
                x=Axis(label="time (UTC)", scale="time"),
                y=Axis(label=label, low=0.0, high=1.0 if place == 0 else None),
                series=[Series(label=cluster, x=at_s, y=values)],
            )
            for place, (label, values) in enumerate(zip(labels, shown, strict=True))
        ]
        key = f"{slug(cluster)}.fragmentation"
        numbers |= {
            f"{key}.mean_share_of_nodes_partly_used": float(share.mean()),
            f"{key}.mean_free_gpus_on_partly_used_nodes": float(found.free_on_partly_used.mean()),
            f"{key}.median_largest_fit_gpus": float(np.median(found.largest_fit)),
        }
        sentences.append(
            f"{cluster}: on average {share.mean():.1%} of {words.plainly(round(found.nodes), 'node')} are partly "
            "used, with "
            f"{found.free_on_partly_used.mean():,.1f} GPUs free on them; in the median of "
            f"{words.plainly(len(share), 'hour')} a job "
            f"of {words.plainly(round(np.median(found.largest_fit)), 'GPU')} would fit."
        )
    some(panels, "no GPU job that was running at a whole hour names its nodes")
    names = (
        "cluster",
        "at_s",
        "share_of_nodes_partly_used",
        "free_gpus_on_partly_used_nodes",
        "largest_fit_gpus",
    )
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)]
    return Result(
        table=Table(dict(zip(names, columns, strict=True))),
        chart=Figure(panels=panels, columns=3),
        caption=" ".join(sentences),
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="fragmentation", section="Waiting and capacity", title="How scattered the free GPUs are",
        run=fragmentation,
    ),
)  # fmt: skip
