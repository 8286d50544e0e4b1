"""Compute the operator's first screen: key figures, three things to do, losses, the trend."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core import words
from holdfast.core.page import KeyFigure
from holdfast.trace.analyses.selection import slug
from holdfast.trace.report.model import Read, Report

ACTIONS: Final = 3
LOSSES: Final = 5
MONTHS: Final = 12
LONG_WAIT_S: Final = 600.0
"""Waits count as long if their 95th percentile is at least this number of seconds."""
FULL: Final = 0.85
"""A cluster counts as full if at least this share of its GPUs is in use."""
UNKNOWN, INFRASTRUCTURE, LIMIT = "Unknown", "Infrastructure", "Limit"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing that the operator can do, and the GPU-hours that it concerns."""

    do: str
    why: str
    gpu_h: float
    """GPU-hours; 0 if they cannot be counted."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The first screen for one cluster; the rows of its tables are texts."""

    cluster: str
    key_figures: list[KeyFigure]
    actions: list[Action]
    losses: list[tuple[str, ...]]
    """For each row: user, cause, jobs, GPU-hours, share of all lost GPU-hours."""
    more_losses: int
    months: list[tuple[str, ...]]
    """The last months: month, share of GPUs in use, 95th percentile of waits, GPU-hours lost."""


def overviews(report: Report) -> list[Overview]:
    """Compute the first screen of each cluster, except clusters that serve only for comparison."""
    return [_overview(read, report) for read in report.clusters if not read.compared]


def _overview(read: Read, report: Report) -> Overview:
    losses = _rows(report, "lost_by_person", read)
    known = _numbers(report, read)
    return Overview(
        cluster=read.cluster.name,
        key_figures=_key_figures(read, report, known),
        actions=_actions(read, report, known),
        losses=[
            (
                row["user"],
                _cause(row),
                f"{row['jobs']:,.0f}",
                _hours(row["lost_gpu_time_h"]),
                words.percent(row["share_of_lost_gpu_time"]),
            )
            for row in losses[:LOSSES]
        ],
        more_losses=max(0, len(losses) - LOSSES),
        months=[
            (
                row["month"],
                words.percent(row["share_in_use"]),
                _or_nothing(row["p95_queue_s"], words.duration),
                _or_nothing(row["lost_gpu_time_h"], _hours),
            )
            for row in _rows(report, "months", read)[-MONTHS:]
        ],
    )


Known = Callable[[str], float | None]


def _numbers(report: Report, read: Read) -> Known:
    """Return a function that looks up a named number of the cluster; None if it is unknown."""
    numbers, key = report.numbers, slug(read.cluster.name)

    def known(name: str) -> float | None:
        value = numbers.get(f"{key}.{name}", math.nan)
        return value if math.isfinite(value) else None

    return known


def _rows(report: Report, analysis: str, read: Read) -> list[dict[str, Any]]:
    """Return the rows of an analysis' table for the cluster; empty if the analysis was left out."""
    for entry in report.entries:
        if entry.analysis.name == analysis and entry.result is not None:
            table = entry.result.table
            rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows()]
            return [row for row in rows if row["cluster"] == read.cluster.name]
    return []


def _key_figures(read: Read, report: Report, known: Known) -> list[KeyFigure]:
    gpus = _gpus(read)
    of = f"of {gpus:,.0f} GPUs, on average" if gpus else "of the most in any hour, on average"
    figures = [
        _figure("GPUs in use", known("allocation.mean"), words.percent, of, "needs start and end"),
    ]
    median_s = known("gpu_job.median_queue_s")
    figures.append(
        _figure(
            "p95 wait",
            known("gpu_job.p95_queue_s"),
            words.duration,
            "" if median_s is None else f"median {words.duration(median_s)}",
            "needs submission and start",
        )
    )
    lost_h = known("lost_to_failures.gpu_time_h")
    failed = known("lost_to_failures.jobs")
    note = ""
    months = _rows(report, "months", read)
    if lost_h is None and any(row["lost_gpu_time_h"] == 0 for row in months):
        lost_h, note = 0.0, "no failed job held a GPU"  # months without job states have NaN
    if lost_h is not None and failed is not None:
        share = lost_h * 3600 / read.gpu_time_s if read.gpu_time_s else 0.0
        note = f"{words.percent(share)}, by {words.plainly(round(failed), 'failed job')}"
    figures.append(_figure("GPU-hours lost", lost_h, _hours, note, "needs the states of jobs"))
    figures.append(_idle(known))
    figures.append(
        KeyFigure("GPU jobs", f"{read.gpu_jobs:,}", f"of {words.plainly(read.jobs, 'job')}")
    )
    figures.append(KeyFigure("GPU-hours", _hours(read.gpu_time_s / 3600), "held by jobs"))
    return figures


def _figure(
    name: str, value: float | None, show: Callable[[float], str], note: str, needs: str
) -> KeyFigure:
    return (
        KeyFigure(name, "unknown", needs) if value is None else KeyFigure(name, show(value), note)
    )


def _idle(known: Known) -> KeyFigure:
    """Return the key figure for the idle GPU time of allocated GPUs.

    The figure is exact if jobs name their nodes, and otherwise a lower bound.
    """
    name = "Idle while allocated"
    share, hours = known("allocated.idle_share"), known("allocated.idle_gpu_h")
    if share is not None and hours is not None:
        return KeyFigure(name, words.percent(share), f"{_gpu_hours(hours)} below 5 % GPU_UTIL")
    share, hours = (
        known("allocated_idle.share_at_least"),
        known("allocated_idle.gpu_h_at_least"),
    )
    if share == 0:  # no hour had more idle GPUs than free ones
        return KeyFigure(name, "unknown", "the idle GPUs may be free; needs the jobs' nodes")
    if share is not None and hours is not None:
        return KeyFigure(
            name, f"at least {words.percent(share)}", f"{_gpu_hours(hours)} at 0 % GPU_UTIL"
        )
    return KeyFigure(name, "unknown", "needs GPU_UTIL of the jobs' hours (--metrics)")


def _actions(read: Read, report: Report, known: Known) -> list[Action]:
    """Return three things to do: the most GPU-hours first, those without a count last."""
    counted = [
        *_about_failures(_rows(report, "lost_by_person", read)),
        *_about_idle(read, report, known),
    ]
    counted.sort(key=lambda action: -action.gpu_h)
    found = [*counted, *_about_waits(read, known), *_about_inputs(read, known)]
    return found[:ACTIONS] if read.gpu_jobs else []


def _about_failures(losses: list[dict[str, Any]]) -> list[Action]:
    """Return things to do about failures.

    These are at most one for failures without a recorded cause, one for failures of nodes, and two
    for single users.
    """
    actions = []
    if unknown := [row for row in losses if row["category"] == UNKNOWN]:
        what, hours, one = _together(unknown)
        most = unknown[0]
        actions.append(
            Action(
                do="Record why jobs fail.",
                why=f"{what} {'has' if one else 'have'} no recorded cause. Diagnose the logs with "
                "holdfast diagnose, and give the causes by --reasons. Begin with "
                f"{most['user']}: {_gpu_hours(most['lost_gpu_time_h'])}.",
                gpu_h=hours,
            )
        )
    if nodes := [row for row in losses if row["category"] == INFRASTRUCTURE]:
        what, hours, one = _together(nodes)
        actions.append(
            Action(
                do="Test the nodes.",
                why=f"{what} {'comes' if one else 'come'} from the infrastructure. Run srun "
                "holdfast nodes check, and let holdfast run replace bad nodes.",
                gpu_h=hours,
            )
        )
    people = [row for row in losses if row["category"] not in (UNKNOWN, INFRASTRUCTURE)]
    for row in people[:2]:
        jobs = words.plainly(round(row["jobs"]), "job")
        advice = (
            "Check the limit and the job's request."
            if row["category"] == LIMIT
            else "Read one of the logs: holdfast diagnose LOG."
        )
        actions.append(
            Action(
                do=f"Help {row['user']}: {_cause(row)}.",
                why=f"{jobs} failed this way and held {_gpu_hours(row['lost_gpu_time_h'])}. {advice}",
                gpu_h=row["lost_gpu_time_h"],
            )
        )
    return actions


def _together(rows: list[dict[str, Any]]) -> tuple[str, float, bool]:
    """Return failures and GPU time as text, the GPU-hours, and True for a single failure."""
    hours, jobs = (
        sum(row["lost_gpu_time_h"] for row in rows),
        round(sum(row["jobs"] for row in rows)),
    )
    return f"{words.plainly(jobs, 'failure')} with {_gpu_hours(hours)}", hours, jobs == 1


def _about_idle(read: Read, report: Report, known: Known) -> list[Action]:
    people = _rows(report, "idle_by_user", read)
    if people and people[0]["idle_gpu_time_h"] > 0:
        most = people[0]
        return [
            Action(
                do=f"Ask {most['username']} about idle GPUs.",
                why=f"Their jobs held {_gpu_hours(most['idle_gpu_time_h'])} with GPU_UTIL below 5 %.",
                gpu_h=most["idle_gpu_time_h"],
            )
        ]
    hours = known("allocated_idle.gpu_h_at_least")
    if not hours:
        return []
    return [
        Action(
            do="Find out who holds idle GPUs.",
            why=f"At least {_gpu_hours(hours)} of allocated GPUs were idle. With the nodes of jobs "
            "and a store of telemetry (holdfast trace convert) this page names the people.",
            gpu_h=hours,
        )
    ]


def _about_waits(read: Read, known: Known) -> list[Action]:
    p95_s, in_use, gpus = known("gpu_job.p95_queue_s"), known("allocation.mean"), _gpus(read)
    if in_use is None or not gpus:
        return []
    free = f"{(1 - in_use) * gpus:,.0f} of {gpus:,.0f} GPUs are free on average"
    if p95_s is not None and p95_s >= LONG_WAIT_S:
        waits = f"5 in 100 GPU jobs wait longer than {words.duration(p95_s)}"
        if in_use < FULL:
            return [
                Action(
                    do="Find out why jobs wait while GPUs are free.",
                    why=f"{waits}, although {free}. Look at quotas, partitions and fragmentation.",
                    gpu_h=0.0,
                )
            ]
        return [
            Action(
                do="Share the GPUs by quota, or add GPUs.",
                why=f"{waits}, and {words.percent(in_use)} of the GPUs are in use.",
                gpu_h=0.0,
            )
        ]
    if in_use < FULL:
        return [
            Action(
                do="Fill the free GPUs.",
                why=f"{free[:1].upper()}{free[1:]}, and few jobs wait. Let best-effort jobs, such "
                "as evaluation, use them.",
                gpu_h=0.0,
            )
        ]
    return []


def _about_inputs(read: Read, known: Known) -> list[Action]:
    """Return things to do that give the next report more input."""
    actions = []
    if known("allocated_idle.share_at_least") is None and known("allocated.idle_share") is None:
        actions.append(
            Action(
                do="Give telemetry of the same time.",
                why="With --metrics (a Prometheus, DCGM or nvidia-smi) this page shows idle GPUs.",
                gpu_h=0.0,
            )
        )
    if not _gpus(read):
        actions.append(
            Action(
                do="Give the size of the cluster.",
                why=f"With --capacity {read.cluster.name}=NODESxGPUS shares are of all GPUs.",
                gpu_h=0.0,
            )
        )
    if known("users.n") is None:
        actions.append(
            Action(
                do="Export the users of jobs.",
                why="With a column of users this page shows whose jobs wait and fail.",
                gpu_h=0.0,
            )
        )
    actions.append(
        Action(
            do="Make this page every month.",
            why="The trend shows whether waits and losses fall.",
            gpu_h=0.0,
        )
    )
    return actions


def _gpus(read: Read) -> float | None:
    cluster = read.cluster
    if cluster.gpu_num is not None:
        return float(cluster.gpu_num)
    return float((cluster.node_num or 0) * (cluster.gpus_per_node or 0)) or None


def _cause(row: dict[str, Any]) -> str:
    return "cause not recorded" if row["category"] == UNKNOWN else str(row["reason"])


def _gpu_hours(hours: float) -> str:
    return f"{_hours(hours)} GPU-hour{'' if _hours(hours) == '1' else 's'}"


def _hours(hours: float) -> str:
    """Format hours with at most three significant figures: `12,300`, `4.56`, `0.012`."""
    if not hours:
        return "0"
    digits = 2 - math.floor(math.log10(abs(hours)))
    return f"{round(hours, digits):,.{max(digits, 0)}f}".removesuffix(".0").removesuffix(".00")


def _or_nothing(value: float, show: Callable[[float], str]) -> str:
    return show(value) if math.isfinite(value) else ""
