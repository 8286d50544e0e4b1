"""Compute exact hourly integrals from the changes in the hourly aggregates."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from holdfast.trace.analyses.selection import UNKNOWN

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]
HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Hourly:
    """A quantity integrated over each hour, by kind."""

    first_hour: int
    """The first hour, numbered from the Unix epoch."""
    kinds: list[str]
    hours: Values
    """Shape (kinds, hours): GPU-hours in use, job-hours waited or GPU-hours waited in each hour."""


def hourly(
    trace: "Trace",
    cluster: str,
    measure: Literal["busy", "waiting", "wanted"],
    by: Literal["type", "pool", "gpu_num"],
) -> Hourly | None:
    """Return GPUs in use, or waiting, in each hour of a cluster from its first change to its last.

    All measures, and every `by`, have the same hours. Jobs that still run (state RUNNING, no end)
    are in use to the last hour.

    Args:
        trace: the trace.
        cluster: one of its clusters.
        measure: `busy`: GPU-hours in use; `waiting`: job-hours waited; `wanted`: GPU-hours
            waited, where an hour of a job counts once per GPU.
        by: column of the kinds; a missing value is `UNKNOWN`. `gpu_num` supports only
            `waiting`.

    Returns:
        The hours, or None if the cluster has no change.
    """
    all_hours = trace.query(
        f"SELECT min(hour) AS first, max(hour) AS last FROM {trace.prepare('job_hours')} WHERE "
        "cluster = ?",
        [cluster],
    )
    first, last = (all_hours[name].tolist()[0] for name in ("first", "last"))
    if first is None or np.isnan(first):
        return None
    table = trace.query(
        f"SELECT coalesce({by}::VARCHAR, '{UNKNOWN}') AS kind, hour, "
        f"sum(sum_{measure}_step)::DOUBLE AS step, "
        f"sum(sum_{measure}_rest_s)::DOUBLE AS rest_s "
        f"FROM {trace.prepare('job_size_hours' if by == 'gpu_num' else 'job_hours')} WHERE cluster "
        "= ? GROUP BY ALL",
        [cluster],
    )
    kinds = sorted(set(table["kind"].tolist()))
    places = {kind: place for place, kind in enumerate(kinds)}
    row = np.array([places[kind] for kind in table["kind"].tolist()], dtype=np.int64)
    shape = len(kinds), int(last - first) + 1
    seconds = integrals(
        table["step"], table["rest_s"], row, table["hour"].astype(np.int64) - int(first), shape
    )
    return Hourly(first_hour=int(first), kinds=kinds, hours=seconds / HOUR_S)


def integrals(
    step: Values,
    rest_s: Values,
    row: npt.NDArray[np.int64],
    hour: npt.NDArray[np.int64],
    shape: tuple[int, int],
) -> Values:
    """Return the integrals over each hour of step functions, given their changes, in unit-seconds.

    The result is exact: a change counts for the rest of its own hour and for all later hours.

    Args:
        step: sum of the changes within an hour.
        rest_s: sum of each change times the seconds left of its hour.
        row: index of the function of each change.
        hour: hour of each change, from 0.
        shape: (functions, hours) of the result.
    """
    place = row * shape[1] + hour
    steps, rests = (
        np.bincount(place, weights=np.nan_to_num(values), minlength=shape[0] * shape[1]).reshape(
            shape
        )
        for values in (step, rest_s)
    )
    before = np.cumsum(steps, axis=1) - steps
    # Sums of thousands of fractions of GPUs end a rounding error above or below 0.
    return np.maximum(rests + HOUR_S * before, 0.0)


def coarser(values: Values, step: int) -> Values:
    """Average over `step` hours along the last axis; the last mean covers the remaining hours."""
    starts = np.arange(0, values.shape[-1], step)
    lengths = np.diff(np.append(starts, values.shape[-1]))
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / lengths)


def starts_s(first_hour: int, hours: int, step: int) -> Values:
    """Return the start of each mean of `step` hours, seconds since the Unix epoch."""
    return np.arange(first_hour, first_hour + hours, step, dtype=np.float64) * HOUR_S


def step_for(hours: int, points: int) -> int:
    """Return the fewest hours per point with at most `points` points.

    The hours divide a day or are whole days.
    """
    for step in (1, 2, 3, 4, 6, 8, 12, 24):
        if hours <= step * points:
            return step
    return 24 * -(-hours // (24 * points))
