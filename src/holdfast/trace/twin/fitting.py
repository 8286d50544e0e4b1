"""Make a calibration from any trace: count its tables, and merge counts of few jobs.

The calibration of a private trace reveals no count below `SMALLEST_CELL` jobs:

- A rarer type becomes `Other`, a rarer GPU count becomes the nearest common one, and a rarer state
  the most frequent one.
- Within a type and GPU count, rarer bins are merged with their neighbours, and the jobs are spread
  evenly over the merged bins.
- Rarer reasons of failures are left out, and so are reasons that the study does not have.
- Users with fewer submissions all get the same share.
- Totals have three significant digits. Names, job ids, single times and the order of jobs are not
  kept.

These rules set a smallest count, and are not differential privacy. For example, a person who has
all jobs but one can still learn something about the last job.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse
from holdfast.core.words import plainly
from holdfast.diagnose import CATEGORIES as CAUSES
from holdfast.trace.twin.bins import BINS, bin_of
from holdfast.trace.twin.model import CPU, Calibration, Floats, Ints, Reasons
from holdfast.trace.twin.placing import peak_gpus
from holdfast.trace.twin.reasons import FAILED
from holdfast.trace.twin.rhythm import usual_rhythm

if TYPE_CHECKING:
    from holdfast.trace.clusters import Cluster
    from holdfast.trace.trace import Trace

SMALLEST_TRACE: Final = 100
"""The fewest jobs in a trace, because drawing from fewer would reveal rows."""
SMALLEST_CELL: Final = 5
"""A count of fewer jobs than this is merged with others."""

NEEDED: Final = ("gpu_num", "submit_s", "queue_s", "duration_s")
_UNFINISHED: Final = ("RUNNING", "PENDING")
_TOGETHER_S: Final = 10.0
"""Seconds between two submissions of a user and type up to which they are in one batch."""


def fit(
    jobs: Mapping[str, npt.NDArray[Any]],
    *,
    name: str = "trace",
    zone: str = "+00:00",
    capacity_gpus: int | None = None,
) -> Calibration:
    """Count the tables of a normalised trace, to be used by `draw`.

    Args:
        jobs: columns of equal length: `gpu_num`, `submit_s` (Unix time), `queue_s`, `duration_s`
            (from the start), and optionally `type`, `state`, `reason`, `cpu_num`, `user`. Jobs that
            have not ended, or whose times are missing or negative, are left out. A part of a GPU
            counts as a whole GPU.
        name: the name of the synthetic trace's cluster.
        zone: the UTC offset of the cluster's local time, such as `+08:00`.
        capacity_gpus: the number of GPUs of the cluster; by default the most that were in use at
            once.

    Raises:
        BadUse: a column is missing, fewer than `SMALLEST_TRACE` jobs are left, or a job is larger
            than the cluster.
    """
    table = _cleaned(jobs)
    gpus, types = table["gpu_num"], table["type"]
    names, numbers = np.unique(types, return_inverse=True)
    values, places = _common_counts(gpus, numbers)
    bins = bin_of(table["duration_s"])
    shape = (len(names), len(values), BINS)
    cells = np.zeros(shape)
    np.add.at(cells, (numbers, places, bins), 1.0)
    kept = np.apply_along_axis(_merged, 2, cells)
    seconds = np.zeros(shape[:2])
    np.add.at(seconds, (numbers, places), table["duration_s"])
    queue_cells = np.zeros((shape[0], BINS))
    np.add.at(queue_cells, (numbers, bin_of(table["queue_s"])), 1.0)
    states, shares, totals, gpu_time = _states(table, cells, numbers, places, bins, values)
    starts = table["submit_s"] + table["queue_s"]
    if capacity_gpus is None:
        whole = (np.rint(starts), np.rint(starts + table["duration_s"]), gpus)
        capacity_gpus = peak_gpus(*(column.astype(np.int64) for column in whole))
    if capacity_gpus < gpus.max():
        message = (
            f"A cluster of {capacity_gpus} GPUs cannot hold the trace's job of {gpus.max()}. "
            "Give the number of GPUs of the cluster, or leave it out to take it from the trace."
        )
        raise BadUse(message)
    first_s = float(np.floor(table["submit_s"].min() / 3600) * 3600)
    hours, dispersion = _rhythm(table["submit_s"], zone)
    gpu = gpus > 0
    return Calibration(
        cluster=name,
        zone=zone,
        start_s=first_s,
        window_s=float(np.ceil(table["submit_s"].max() - first_s)) + 1.0,
        snapshot_s=None,
        counts_queue=False,
        capacity_gpus=capacity_gpus,
        types=tuple(names.tolist()),
        gpu_nums=values,
        cells=kept,
        seconds=_three_digits(seconds),
        duration_limit_s=np.array([2.0 ** np.flatnonzero(own.sum(axis=0)).max() for own in kept]),
        longest=None,
        queue_cells=np.apply_along_axis(_merged, 1, queue_cells),
        queue_seconds=_three_digits(np.bincount(numbers, table["queue_s"], minlength=len(names))),
        medians_s={
            f"{kind}_{what}": float(np.rint(np.median(table[f"{what}_s"][own])))
            for kind, own in (("gpu", gpu), ("cpu", ~gpu))
            for what in ("duration", "queue")
            if own.sum() >= SMALLEST_TRACE
        },
        states=states,
        state_shares=shares,
        state_totals=totals,
        state_gpu_time=gpu_time,
        users=_users(table["user"], numbers, len(names)),
        cpus=_cpus(table["cpu_num"], numbers, places, shape[:2]),
        hour_of_week=hours,
        dispersion=dispersion,
        batch_sizes=_batch_sizes(table, numbers, len(names)),
        rhythm=usual_rhythm(
            tuple(names.tolist()), drift=_drift(table["submit_s"], numbers, len(names))
        ),
        reasons=_reasons(table),
    )


def _cleaned(jobs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    missing = [column for column in NEEDED if column not in jobs]
    if missing:
        message = f"The trace has no column {missing[0]!r}, without which no twin can be fitted. Give one that has it."
        raise BadUse(message)
    numbers = {column: np.asarray(jobs[column], dtype=float) for column in NEEDED}
    count = len(numbers["gpu_num"])
    state = _words(jobs.get("state"), count, "COMPLETED")
    good = ~np.isin(state, _UNFINISHED)
    for column, values in numbers.items():
        good &= np.isfinite(values) & (values >= 0 if column != "submit_s" else True)
    if good.sum() < SMALLEST_TRACE:
        message = (
            f"The trace has {plainly(int(good.sum()), 'job')} that ended and whose times are known; a twin of fewer "
            f"than {SMALLEST_TRACE} would give rows away. Fit a longer stretch of the trace."
        )
        raise BadUse(message)
    gpus = np.ceil(numbers["gpu_num"][good]).astype(np.int64)
    type_ = np.where(gpus == 0, CPU, _words(jobs.get("type"), count, "Other")[good])
    names, counts = np.unique(type_, return_counts=True)
    # `Other` may itself be rare. Its jobs then get the most frequent type.
    rare = names[(counts < SMALLEST_CELL) & (names != CPU)]
    type_ = np.where(np.isin(type_, rare), "Other", type_)
    if 0 < (type_ == "Other").sum() < SMALLEST_CELL:
        type_ = np.where(
            type_ == "Other", names[np.argmax(np.where(names == CPU, -1, counts))], type_
        )
    cpus = jobs.get("cpu_num")
    cpu_num = (
        np.asarray(cpus, dtype=float)[good]
        if cpus is not None
        else np.full(int(good.sum()), np.nan)
    )
    return {
        **{column: values[good] for column, values in numbers.items()},
        "gpu_num": gpus,
        "type": type_,
        "state": state[good],
        "reason": _words(jobs.get("reason"), count, "")[good],
        "user": _words(jobs.get("user"), count, "user")[good],
        "cpu_num": np.where(np.isfinite(cpu_num), cpu_num, np.maximum(8.0 * gpus, 1.0)),
    }


def _words(column: npt.NDArray[Any] | None, count: int, default: str) -> npt.NDArray[Any]:
    if column is None:
        return np.full(count, default)
    values = np.asarray(column, dtype=object)
    known = np.array(
        [isinstance(value, str) and value != "" for value in values.tolist()], dtype=bool
    )
    return np.where(known, values, default).astype("U")


def _common_counts(gpus: Ints, types: Ints) -> tuple[Floats, Ints]:
    """Replace rare GPU counts by common ones.

    A GPU count is common if enough jobs have it, in the whole trace and also within the job's type.

    Returns:
        The common GPU counts, and for each job the index of its count.
    """
    own, counts = np.unique(gpus, return_counts=True)
    common = own[(counts >= SMALLEST_CELL) & (own > 0)]
    if not len(common):
        common = own[own > 0][:1]
    values = np.concatenate([own[own == 0], common]).astype(float)
    places = np.empty(len(gpus), dtype=np.int64)
    for type_ in np.unique(types):
        members = np.flatnonzero(types == type_)
        nearest = _nearest(gpus[members], values)
        held = np.bincount(nearest, minlength=len(values))
        enough = np.flatnonzero(held >= SMALLEST_CELL)
        enough = enough if len(enough) else np.array([int(np.argmax(held))])
        places[members] = enough[_nearest(values[nearest], values[enough])]
    return values, places


def _nearest(wanted: npt.NDArray[Any], values: Floats) -> Ints:
    """Return, for each wanted value, the index of the value that is nearest by ratio.

    A wanted 0 matches only 0.
    """
    distance = np.abs(
        np.log(np.maximum(wanted, 1e-3))[:, None] - np.log(np.maximum(values, 1e-3))[None, :]
    )
    return np.asarray(np.argmin(distance, axis=1))


def _merged(counts: Floats) -> Floats:
    """Merge neighbouring bins until each group has enough jobs, and spread each group evenly."""
    filled = np.flatnonzero(counts)
    if not len(filled):
        return counts
    groups: list[list[int]] = [[]]
    for bin_ in filled.tolist():
        groups[-1].append(bin_)
        if counts[groups[-1]].sum() >= SMALLEST_CELL:
            groups.append([])
    last = groups.pop()
    if last and groups:
        groups[-1] += last
    elif last:
        groups.append(last)
    merged = np.zeros_like(counts)
    for group in groups:
        span = slice(group[0], group[-1] + 1)
        merged[span] = counts[group].sum() / (group[-1] + 1 - group[0])
    return merged


def _states(
    table: dict[str, npt.NDArray[Any]],
    cells: Floats,
    numbers: Ints,
    places: Ints,
    bins: Ints,
    values: Floats,
) -> tuple[tuple[str, ...], Floats, Floats, Floats]:
    """Return the names of the final states, and three tables of their shares.

    The tables have the shares among the jobs of each cell, among CPU jobs and among GPU jobs, and
    of GPU time. The shares in a cell are computed from all cells of the type with a similar GPU
    count and duration, and then adjusted to the type's overall shares.
    """
    names, counts = np.unique(table["state"], return_counts=True)
    usual = names[np.argmax(counts)]
    state = np.where(np.isin(table["state"], names[counts < SMALLEST_CELL]), usual, table["state"])
    names, own = np.unique(state, return_inverse=True)
    gpu = table["gpu_num"] > 0
    totals = np.array(
        [np.bincount(own[gpu == row], minlength=len(names)) for row in (False, True)], dtype=float
    )
    totals /= np.maximum(totals.sum(axis=1, keepdims=True), 1.0)
    time = table["gpu_num"] * table["duration_s"]
    gpu_time = np.bincount(own, time, minlength=len(names)) / max(float(time.sum()), 1.0)
    sizes, lengths = np.digitize(values, [1, 2, 8, 9, 64]), np.arange(BINS) // 4
    by_class = np.zeros((len(cells), 6, int(lengths.max()) + 1, len(names)))
    np.add.at(by_class, (numbers, sizes[places], lengths[bins], own), 1.0)
    by_type = by_class.sum(axis=(1, 2)) + 1e-3
    by_type /= by_type.sum(axis=1, keepdims=True)
    drawn = by_class + SMALLEST_CELL * by_type[:, None, None, :]
    drawn /= drawn.sum(axis=-1, keepdims=True)
    return tuple(names.tolist()), drawn[:, sizes][:, :, lengths], totals, _three_digits(gpu_time)


def _reasons(table: dict[str, npt.NDArray[Any]]) -> Reasons | None:
    """Return the reasons of failed GPU jobs that occur often enough; None if there are none.

    Only reasons in the study's Table 3 are kept, since a source's own words may reveal more. A
    fitted synthetic trace has the reasons of its own trace, so their numbers differ from the
    study's.
    """
    failed = (
        (table["gpu_num"] > 0)
        & np.isin(table["state"], FAILED)
        & np.isin(table["reason"], list(CAUSES))
    )
    names, own, counts = np.unique(table["reason"][failed], return_inverse=True, return_counts=True)
    common = np.flatnonzero(counts >= SMALLEST_CELL)
    if not len(common):
        return None
    gpus, run_s = table["gpu_num"][failed].astype(float), table["duration_s"][failed]
    sums = [
        np.bincount(own, values, minlength=len(names))[common]
        for values in (gpus, run_s, gpus * run_s)
    ]
    jobs = counts[common].astype(float)
    return Reasons(
        names=tuple(names[common].tolist()),
        types=frozenset(table["type"][failed].tolist()),
        jobs=jobs,
        gpu_num=_three_digits(sums[0] / jobs),
        run_s=_three_digits(np.maximum(sums[1] / jobs, 1.0)),
        gpu_time_s=_three_digits(sums[2]),
    )


def _users(users: npt.NDArray[Any], types: Ints, count: int) -> Floats:
    """Return each user's share of the jobs, of shape (types, users), without names.

    Columns are users, sorted by their jobs of all types, the busiest first. Within a type, all
    users with few submissions get the same share.
    """
    _, own = np.unique(users, return_inverse=True)
    by_type = np.zeros((count, int(own.max()) + 1))
    np.add.at(by_type, (types, own), 1.0)
    by_type = by_type[:, np.argsort(-by_type.sum(axis=0), kind="stable")]
    for row in by_type:
        little = (row > 0) & (row < SMALLEST_CELL)
        if little.any():
            row[little] = row[little].sum() / little.sum()
    return np.asarray(by_type / by_type.sum(axis=1, keepdims=True))


def _cpus(cpus: Floats, types: Ints, places: Ints, shape: tuple[int, int]) -> Floats:
    """Return the median number of CPU cores, of shape (types, GPU counts)."""
    medians = np.ones(shape)
    for key in np.unique(types * shape[1] + places).tolist():
        type_, place = divmod(key, shape[1])
        medians[type_, place] = np.median(cpus[(types == type_) & (places == place)])
    return medians


def _rhythm(submit_s: Floats, zone: str) -> tuple[Floats, float]:
    """Return the share of submissions in each hour of the week, and the spread between days.

    The spread is a standard deviation. It excludes the weekly pattern, and the variation that
    chance alone would cause.
    """
    sign = -1 if zone.startswith("-") else 1
    offset_s = sign * (int(zone[1:3]) * 3600 + int(zone[4:6]) * 60)
    hours = ((submit_s + offset_s) // 3600).astype(np.int64)
    week = np.bincount((hours + 72) % 168, minlength=168) + 1.0
    days = np.bincount(hours // 24 - (hours // 24).min())
    busy = days[days > 0]
    spread = float(np.std(np.log(busy)) ** 2 - np.mean(1 / busy)) if len(busy) > 2 else 0.0
    return week / week.sum(), float(min(max(spread, 0.0) ** 0.5, 1.5))


def _drift(submit_s: Floats, types: Ints, count: int) -> Floats:
    """Return the drift exponent of each type that reproduces the mean arrival time of its jobs.

    The exponents are limited to the range from 1/3 to 3, and 1 means no drift.
    """
    parts = (submit_s - submit_s.min()) / max(float(np.ptp(submit_s)), 1.0)
    mean = np.bincount(types, parts, minlength=count) / np.bincount(types, minlength=count)
    # If the share of jobs submitted by time u is u**drift, the mean of u is drift / (1 + drift).
    return np.asarray(np.clip(mean / np.maximum(1 - mean, 1e-9), 1 / 3, 3.0))


def _batch_sizes(table: dict[str, npt.NDArray[Any]], types: Ints, count: int) -> Floats:
    """Return the mean number of jobs in a batch, for each type."""
    _, users = np.unique(table["user"], return_inverse=True)
    order = np.lexsort((table["submit_s"], users, types))
    apart = np.diff(table["submit_s"][order], prepend=-np.inf) > _TOGETHER_S
    apart |= (np.diff(users[order], prepend=-1) != 0) | (np.diff(types[order], prepend=-1) != 0)
    batches = np.bincount(types[order][apart], minlength=count)
    return np.asarray(np.bincount(types, minlength=count) / np.maximum(batches, 1))


def _three_digits(values: npt.NDArray[Any]) -> Floats:
    scale = 10.0 ** (np.floor(np.log10(np.maximum(np.abs(values), 1e-12))) - 2)
    return np.asarray(np.rint(values / scale) * scale)


def jobs_of(trace: "Trace") -> tuple["Cluster", dict[str, npt.NDArray[Any]]]:
    """Return the cluster of a trace, and its jobs as NumPy columns in the order of submission.

    `submit_s` is a Unix time. `queue_s` and `duration_s` are in seconds, and `duration_s` counts
    from the start. Columns that the trace lacks are left out.

    Raises:
        BadUse: the trace has several clusters, or lacks times that a synthetic trace or a simulator
            needs.
    """
    names = [name for name in trace.clusters if name not in trace.compared]
    if len(names) != 1:
        raise BadUse(
            f"The trace holds {len(names)} clusters: {', '.join(names)}. Give the jobs of one of them."
        )
    needed = {
        "submit_at": "submit_s",
        "queue_s": "queue_s",
        "run_s": "duration_s",
        "gpu_num": "gpu_num",
    }
    if missing := [column for column in needed if not trace.has(column)]:
        raise BadUse(
            f"The trace has no {' and no '.join(missing)}, without which no jobs can be replayed. Use another."
        )
    optional = {
        "type": "type",
        "state": "state",
        "reason": "reason",
        "username": "user",
        "job_id": "job_id",
    }
    numbers = {"node_num": "node_num", "cpu_num": "cpu_num"}
    selected = [
        "epoch(submit_at) AS submit_s",
        "queue_s",
        "run_s AS duration_s",
        "gpu_num",
        *(
            f"{column} AS {name}"
            for column, name in (optional | numbers).items()
            if trace.has(column)
        ),
    ]
    table = trace.query(
        f"SELECT {', '.join(selected)} FROM jobs WHERE cluster = ? ORDER BY submit_at", [names[0]]
    )
    columns = dict(table.columns)
    for name in numbers.values():
        # If any value is unknown, drop the column: the reader has a default only for a missing
        # column.
        if name in columns and np.isnan(columns[name].astype(float)).any():
            del columns[name]
    return trace.clusters[names[0]], columns
