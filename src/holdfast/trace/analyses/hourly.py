"""Integrate GPUs in use, and jobs waiting, over each hour, exactly.

The integrals are computed from the changes in the hourly aggregates.
"""

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
    """A quantity integrated over each hour, for each kind of job."""

    first_hour: int
    """First hour, counted from the Unix epoch."""
    kinds: list[str]
    hours: Values
    """Shape (kinds, hours): GPU-hours in use, job-hours waited, or GPU-hours waited."""


def hourly(
    trace: "Trace",
    cluster: str,
    measure: Literal["busy", "waiting", "wanted"],
    by: Literal["type", "pool", "gpu_num"],
) -> Hourly | None:
    """Return the GPUs in use, or the jobs waiting, in each hour of a cluster.

    The hours range from the first change of any measure to the last, so all calls for a cluster
    return the same hours. Jobs that are still running (state RUNNING, no end) are in use up to the
    last hour.

    Args:
        trace: the trace.
        cluster: one of the trace's clusters.
        measure: `busy` for GPU-hours in use, `waiting` for job-hours waited, or `wanted` for
            GPU-hours waited, in which an hour counts once for each GPU that the job requests.
        by: the column that defines the kinds of jobs; a missing value is `UNKNOWN`. `gpu_num` can
            only be combined with `waiting`.

    Returns:
        The integrals, or None if no job of the cluster started, ended or was submitted.
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
    """Integrate step functions over each hour, given their changes; the unit is step times seconds.

    The result is exact, because a change counts for the rest of its own hour and for all later
    hours.

    Args:
        step: for each entry, the sum of a function's changes within one hour.
        rest_s: for each entry, the sum of each change times the seconds left in the hour after it.
        row: for each entry, the index of the function.
        hour: for each entry, the hour of the changes, from 0.
        shape: the shape (functions, hours) of the result.
    """
    place = row * shape[1] + hour
    steps, rests = (
        np.bincount(place, weights=np.nan_to_num(values), minlength=shape[0] * shape[1]).reshape(
            shape
        )
        for values in (step, rest_s)
    )
    before = np.cumsum(steps, axis=1) - steps
    # Rounding may leave the sum of thousands of GPU fractions slightly below 0.
    return np.maximum(rests + HOUR_S * before, 0.0)


def coarser(values: Values, step: int) -> Values:
    """Average over groups of `step` hours along the last axis.

    The last group may have fewer hours.
    """
    starts = np.arange(0, values.shape[-1], step)
    lengths = np.diff(np.append(starts, values.shape[-1]))
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / lengths)


def starts_s(first_hour: int, hours: int, step: int) -> Values:
    """Return the start of each group of `step` hours, in seconds since the Unix epoch."""
    return np.arange(first_hour, first_hour + hours, step, dtype=np.float64) * HOUR_S


def step_for(hours: int, points: int) -> int:
    """Return the smallest number of hours per point that needs at most `points` points.

    The result divides a day, or is a number of whole days.
    """
    for step in (1, 2, 3, 4, 6, 8, 12, 24):
        if hours <= step * points:
            return step
    return 24 * -(-hours // (24 * points))
