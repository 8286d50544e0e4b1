"""Hour by hour: exact integrals from the changes that the hourly aggregates hold."""

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
    """Something summed over each hour, by kind."""

    first_hour: int
    """The first of the hours, numbered from the Unix epoch."""
    kinds: list[str]
    hours: Values
    """Shape (kinds, hours): GPU-hours in use, job-hours or GPU-hours waited, within each hour."""


def hourly(
    trace: "Trace",
    cluster: str,
    measure: Literal["busy", "waiting", "wanted"],
    by: Literal["type", "pool", "gpu_num"],
) -> Hourly | None:
    """GPUs in use, or waiting, in each hour of a cluster from its first change to its last; None where it has none.

    Args:
        trace: the trace.
        cluster: one of its clusters.
        measure: `busy`: GPU-hours in use; `waiting`: job-hours waited; `wanted`: GPU-hours waited for, a job's hour
            counting as many times as it has GPUs.
        by: what the kinds are; one that is missing is `UNKNOWN`. By `gpu_num` there is only `waiting`.

    Jobs that run on (state RUNNING, no end) are in use to the last hour. All three measures, and every `by`, have the
    same hours.
    """
    all_hours = trace.query(
        f"SELECT min(hour) AS first, max(hour) AS last FROM {trace.prepare('job_hours')} WHERE cluster = ?",
        [cluster],
    )
    first, last = (all_hours[name].tolist()[0] for name in ("first", "last"))
    if first is None or np.isnan(first):
        return None
    table = trace.query(
        f"SELECT coalesce({by}::VARCHAR, '{UNKNOWN}') AS kind, hour, sum(sum_{measure}_step)::DOUBLE AS step, "
        f"sum(sum_{measure}_rest_s)::DOUBLE AS rest_s "
        f"FROM {trace.prepare('job_size_hours' if by == 'gpu_num' else 'job_hours')} WHERE cluster = ? GROUP BY ALL",
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
    """The integrals over each hour of step functions, one a row of the answer, from the changes within the hours.

    Args:
        step: the sum of the changes within an hour.
        rest_s: the sum of each change times the seconds of its hour that were left.
        row: of which function the changes are.
        hour: in which hour they are, from 0.
        shape: (functions, hours) of the answer.

    Exact: a change counts for what is left of its own hour and for all of each later one. In unit-seconds.
    """
    place = row * shape[1] + hour
    steps, rests = (
        np.bincount(place, weights=np.nan_to_num(values), minlength=shape[0] * shape[1]).reshape(
            shape
        )
        for values in (step, rest_s)
    )
    before = np.cumsum(steps, axis=1) - steps
    # Sums of thousands of fractions of GPUs leave a last digit above or below nothing.
    return np.maximum(rests + HOUR_S * before, 0.0)


def coarser(values: Values, step: int) -> Values:
    """Means of `step` hours along the last axis; the last mean is over the hours that are left."""
    starts = np.arange(0, values.shape[-1], step)
    lengths = np.diff(np.append(starts, values.shape[-1]))
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / lengths)


def starts_s(first_hour: int, hours: int, step: int) -> Values:
    """When each mean of `step` hours begins: seconds from the Unix epoch."""
    return np.arange(first_hour, first_hour + hours, step, dtype=np.float64) * HOUR_S


def step_for(hours: int, points: int) -> int:
    """The fewest hours to a point, of those that divide a day or are whole days, with at most `points` points."""
    for step in (1, 2, 3, 4, 6, 8, 12, 24):
        if hours <= step * points:
            return step
    return 24 * -(-hours // (24 * points))
