"""Find nodes that fail unusually often, and the Xid errors of GPUs."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.measured import measured, sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, slug
from holdfast.trace.causes import causes_of
from holdfast.trace.charts import Axis, Bars, Figure, Lines, Panel, Series
from holdfast.trace.errors import LeftOut
from holdfast.trace.intervals import false_discovery_rates, poisson_at_least
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

SECTION = "Failures and what they cost"


def failing_nodes(trace: "Trace", *, false_discovery_rate: float = 0.05, top: int = 20) -> Result:
    """Find nodes on which jobs fail more often than on the other nodes in the same time.

    The expected failures of a node depend on the hours that it ran jobs of each size. Sizes are
    numbers of nodes, grouped by powers of two. The hours of each size are multiplied by the
    cluster's failure rate for that size, so running large jobs does not count against a node. The
    p-value is the upper tail of a Poisson count. The q-value limits the share of false alarms
    (Benjamini & Hochberg 1995). A failed job counts for each of its nodes, because its record does
    not name the faulty one. If the cluster has any infrastructure failure, only infrastructure
    failures count, otherwise all failures.

    Args:
        trace: a trace with states, run times and the column `nodes`.
        false_discovery_rate: the caption names the nodes with a q-value of at most this.
        top: the number of nodes in the chart; the table has all nodes.

    Raises:
        LeftOut: a column is missing, or nothing failed.
    """
    trace.require("nodes", "state", "run_s")
    table = trace.aggregate("node_failures")
    infrastructure = np.array(
        [cause.category == "Infrastructure" for cause in causes_of(table)], dtype=bool
    )
    infrastructure &= table["is_failed"].astype(bool)
    parts, panels, numbers, captions = [], [], {}, {}
    for cluster in in_order(trace):
        own = table["cluster"] == cluster
        kind = "infrastructure" if infrastructure[own].any() else "all"
        counted = infrastructure if kind == "infrastructure" else table["is_failed"].astype(bool)
        if not counted[own].any():
            continue
        nodes = _excess(table, own, counted)
        named = nodes["q_value"] <= false_discovery_rate
        parts.append(
            Table(
                {
                    "cluster": np.array([cluster] * len(nodes), dtype=object),
                    **nodes.columns,
                    "stands_out": named,
                }
            )
        )
        numbers[f"{slug(cluster)}.nodes.number"] = float(len(nodes))
        numbers[f"{slug(cluster)}.nodes.standing_out"] = float(named.sum())
        share = float(nodes["failures"][named].sum() / nodes["failures"].sum())
        numbers[f"{slug(cluster)}.nodes.standing_out.share_of_failures"] = share
        what = "infrastructure failures" if kind == "infrastructure" else "failures"
        captions[cluster] = (
            f"{named.sum():,} of {words.plainly(len(nodes), 'node')} fail more than their share (false discovery "
            "rate "
            f"{false_discovery_rate:.0%}) and have {share:.1%} of the {what} on nodes"
        )
        if named.any():
            captions[cluster] += f", most of all {nodes['node'][0]} ({nodes['failures'][0]:g}, "
            captions[cluster] += f"{nodes['expected'][0]:.2g} expected)"
        panels.append(
            Bars(
                title=cluster,
                value=Axis(label=what, low=0.0),
                groups=[str(name) for name in nodes["node"][:top]],
                parts={"seen": nodes["failures"][:top], "expected": nodes["expected"][:top]},
            )
        )
    if not parts:
        raise LeftOut("Left out: no job with a list of nodes failed.")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns}
    return Result(
        table=Table(columns),
        chart=Figure(panels=panels),
        caption=sentences(captions),
        numbers=numbers,
    )


def xid_errors(
    trace: "Trace", *, burst_gap_s: float = 60.0, gpu_hours: float | None = None
) -> Result:
    """Count the Xid errors of GPUs by code, day and node, with bursts and GPU-hours per error.

    The telemetry reports a GPU's last Xid code in every sample. An error is therefore counted only
    at its onset, when the code changes from 0. A burst is a series of onsets, each at most
    `burst_gap_s` after the previous one. One fault of a network or a job causes onsets on many
    GPUs, so GPU-hours per burst are reported too. Xid 43 and 31 are mostly caused by the
    application (NVIDIA's Xid catalogue).

    Args:
        trace: a trace with onsets from the metric XID_ERRORS.
        burst_gap_s: the longest time between two onsets of a burst, in seconds.
        gpu_hours: the observed GPU-hours, for a trace of one cluster. By default the number of GPUs
            times the hours from the first to the last hour with telemetry of a GPU.

    Raises:
        LeftOut: the trace has no telemetry of XID_ERRORS, or it has no onset.
    """
    onsets = measured(trace, "xid_onsets")
    if not len(onsets):
        trace.require_metrics("XID_ERRORS")
        raise LeftOut("Left out: XID_ERRORS was measured, and no Xid error began in that time.")
    placed = trace.query(
        "SELECT o.cluster, d.node, d.name AS gpu, o.at, o.code::INTEGER AS code FROM "
        "agg_xid_onsets o "
        "JOIN devices d USING (cluster, device) ORDER BY o.cluster, o.at, gpu"
    )
    parts: list[tuple[str, str, str, float]] = []
    panels: list[Panel] = []
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for cluster in dict.fromkeys(placed["cluster"].tolist()):
        own = placed.where(cluster=cluster)
        key = f"{slug(cluster)}.xid"
        at_s = own["at"].astype("datetime64[us]").astype(np.int64) / 1e6
        burst = np.cumsum(np.concatenate([[0], np.diff(at_s) > burst_gap_s]))
        sizes = np.bincount(burst)
        largest = int(sizes.argmax())
        in_largest = burst == largest
        hours = gpu_hours if gpu_hours is not None else _gpu_hours(trace, cluster)
        codes, of_code = np.unique(own["code"], return_counts=True)
        days, of_day = np.unique(own["at"].astype("datetime64[D]"), return_counts=True)
        names, of_node = np.unique(own["node"].astype(str), return_counts=True)
        numbers |= {
            f"{key}.onsets": float(len(own)),
            f"{key}.gpus": float(len(set(own["gpu"].tolist()))),
            f"{key}.nodes": float(len(names)),
            f"{key}.bursts": float(len(sizes)),
            f"{key}.largest_burst.onsets": float(sizes[largest]),
            f"{key}.largest_burst.nodes": float(len(set(own["node"][in_largest].tolist()))),
            f"{key}.gpu_h_per_onset": hours / len(own),
            f"{key}.gpu_h_per_burst": hours / len(sizes),
            **{
                f"{key}.code_{code}.onsets": float(n)
                for code, n in zip(codes, of_code, strict=True)
            },
        }
        for split, values, counts in (
            ("code", codes.astype(str), of_code),
            ("day", days.astype(str), of_day),
            ("node", names, of_node),
            (
                "burst from",
                own["at"][np.searchsorted(burst, np.arange(len(sizes)))].astype("datetime64[s]"),
                sizes,
            ),
        ):
            parts += [
                (cluster, split, str(value), float(n))
                for value, n in zip(values, counts, strict=True)
            ]
        order = np.argsort(-of_code, kind="stable")
        captions[cluster] = (
            f"{len(own):,} onsets on {numbers[f'{key}.gpus']:,.0f} GPUs of {words.plainly(len(names), 'node')}, "
            "most of them Xid "
            f"{codes[order[0]]} ({of_code[order[0]] / len(own):.0%}); the largest of "
            f"{len(sizes):,} bursts has "
            f"{sizes[largest]:,} onsets on {numbers[f'{key}.largest_burst.nodes']:,.0f} nodes from "
            f"{str(own['at'][in_largest][0].astype('datetime64[s]')).replace('T', ' ')} UTC; "
            f"{hours / len(own):,.0f} GPU-hours to an onset, {hours / len(sizes):,.0f} to a burst"
        )
        panels += [
            Bars(
                title=f"{cluster}: onsets by code",
                value=Axis(label="Xid onsets", low=0.0),
                groups=[f"Xid {codes[place]}" for place in order],
                parts={"onsets": of_code[order].astype(float)},
            ),
            Lines(
                title=f"{cluster}: onsets over time",
                x=Axis(label="UTC", scale="time"),
                y=Axis(label="Xid onsets so far", low=0.0),
                series=[
                    Series(label=cluster, x=at_s, y=np.arange(1.0, len(at_s) + 1), style="step")
                ],
            ),
        ]
    return Result(
        table=Table.of_rows(("cluster", "by", "value", "onsets"), parts),
        chart=Figure(panels=panels),
        caption=sentences(captions),
        numbers=numbers,
    )


def _excess(table: Table, own: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_]) -> Table:
    """Return one row per node: hours, failures, expected failures, p-value and q-value.

    The rows are sorted by p-value, the smallest first.
    """
    names, node = np.unique(table["node"][own].astype(str), return_inverse=True)
    _, size = np.unique(table["job_nodes"][own], return_inverse=True)
    shape = (len(names), int(size.max()) + 1)
    hours, failures = np.zeros(shape), np.zeros(shape)
    np.add.at(hours, (node, size), table["sum_run_s"][own].astype(float) / 3600)
    np.add.at(failures, (node, size), table["n"][own].astype(float) * counted[own])
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = np.nan_to_num(failures.sum(axis=0) / hours.sum(axis=0), posinf=0.0)
    expected = hours @ rates
    p_values = poisson_at_least(failures.sum(axis=1), expected)
    found: dict[str, npt.NDArray[Any]] = {
        "node": names.astype(object),
        "node_hours": hours.sum(axis=1),
        "failures": failures.sum(axis=1),
        "expected": expected,
        "p_value": p_values,
        "q_value": false_discovery_rates(p_values),
    }
    order = np.lexsort([-found["failures"], p_values])
    return Table({name: column[order] for name, column in found.items()})


def _gpu_hours(trace: "Trace", cluster: str) -> float:
    gpus = trace.query(
        "SELECT count(*) AS n FROM devices WHERE cluster = ? AND gpu IS NOT NULL", [cluster]
    )["n"][0]
    hours = measured(trace, "metric_hours").where(cluster=cluster)["hour"].astype("datetime64[h]")
    return (
        float(gpus * ((hours.max() - hours.min()).astype(int) + 1)) if len(hours) else float("nan")
    )


ANALYSES = (
    Analysis(
        name="failing_nodes",
        section=SECTION,
        title="Nodes that fail more than their share",
        run=failing_nodes,
    ),
    Analysis(name="xid_errors", section=SECTION, title="Xid errors of GPUs", run=xid_errors),
)
