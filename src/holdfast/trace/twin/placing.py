"""Stage 7: choose a start for each batch, such that jobs never hold more GPUs than the cluster has.

The duration of a job is already fixed, so only its start can change. Batches are placed in this
order:

1. Batches whose start is fixed.
2. Batches of the type that has a quota of its own, in the order of their arrival. If there is no
   room for a batch, it delays all later ones of this type.
3. All other batches, those with the most GPU time first. Each starts at its wanted time, or at the
   nearest time with enough GPUs.

Time is divided into buckets of five minutes. A job counts in every bucket that it touches, so the
counted use is never below the true use.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.trace.twin.arrivals import BUCKET_S
from holdfast.trace.twin.model import Floats, Ints

_TRIES: Final = 6
_NEAR_S: Final = 300.0
_LONG_JOBS: Final = 0.8
"""Share of the cluster that may be used by the batches with the most GPU time.

The share grows to 1 for the batches that are placed later.
"""

_DAY: Final = 86_400 // BUCKET_S
_HOURS_KEPT: Final = 2
"""Penalty for a start at another hour of the day, in hours of distance per hour of difference.

The same hour on another day is therefore preferred.
"""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Hold the GPU jobs to place: batch, GPUs, and begin and end in s from the batch's start."""

    batches: Ints
    gpu_nums: Ints
    begins_s: Ints
    ends_s: Ints


def placed(
    demand: Demand,
    *,
    wanted_s: Floats,
    latest_s: Floats,
    fixed: dict[int, int],
    reserved: frozenset[int] = frozenset(),
    capacity_gpus: int | None,
    may_exceed_window: bool,
    rng: np.random.Generator,
) -> Ints:
    """Return the start of each batch, in seconds from the start of the time window.

    Args:
        demand: the jobs; batches are numbered from 0 without gaps.
        wanted_s: the wanted start of each batch.
        latest_s: the latest possible start of each batch.
        fixed: the start of each batch that must not move, by batch number.
        reserved: the batches that have a quota of their own. They start in the order of arrival,
            and are not moved by other batches.
        capacity_gpus: the largest number of GPUs in use at once; None means no limit.
        may_exceed_window: what to do if there is no room for a batch: True places it after all
            others, False where the use exceeds the limit least.
        rng: the random generator.
    """
    count = len(latest_s)
    starts: Ints = np.clip(wanted_s, 0, latest_s).astype(np.int64)
    for batch, start in fixed.items():
        starts[batch] = start
    if capacity_gpus is None or not len(demand.batches):
        return starts
    order = np.argsort(demand.batches, kind="stable")
    batches, gpus = demand.batches[order], demand.gpu_nums[order]
    begins, ends = demand.begins_s[order], demand.ends_s[order]
    edges = np.searchsorted(batches, np.arange(count + 1))
    held = np.add.reduceat(gpus * (ends - begins), edges[:-1]) if count else np.array([])
    # The order: fixed batches, then batches with their own quota by arrival, then the others by
    # falling GPU time.
    falling = np.argsort(-held, kind="stable")
    rank = falling.tolist()
    rank.sort(
        key=lambda batch: (
            (0, 0.0) if batch in fixed else (1, wanted_s[batch]) if batch in reserved else (2, 0.0)
        )
    )
    horizon = int((max(latest_s.max(), 0) + int(ends.max())) // BUCKET_S) + 3
    grid = _Grid(horizon, capacity_gpus)
    # The batches that are placed first leave some room for those placed last. If long jobs could
    # fill the cluster, there would be no evaluation for weeks; in reality, people keep their quota
    # free.
    placed_part = np.empty(count)
    placed_part[falling] = (np.cumsum(held[falling]) - held[falling]) / max(float(held.sum()), 1.0)
    usual = np.floor(capacity_gpus * (_LONG_JOBS + (1 - _LONG_JOBS) * placed_part))
    # Try a few starts near the wanted one, then search for the nearest free start.
    away_s = rng.normal(size=(_TRIES, count)) * _NEAR_S * 2.0 ** np.arange(_TRIES)[:, None]
    away_s[0] = 0.0
    tries = np.clip(starts + away_s, 0, latest_s).astype(np.int64)
    turn = 0
    for batch in rank:
        most = float(usual[batch])
        jobs = slice(edges[batch], edges[batch + 1])
        own = gpus[jobs], begins[jobs], ends[jobs]
        if batch in fixed:
            grid.hold(*grid.use(starts[batch], *own))
            continue
        wanted, near = int(starts[batch]), tries[:, batch].tolist()
        if batch in reserved:
            wanted = max(wanted, turn)
            near = [min(wanted, int(latest_s[batch]))]
        for start in near:
            first, use = grid.use(start, *own)
            if grid.fits(first, use, most=most):
                break
        else:
            start = grid.search(
                wanted,
                int(latest_s[batch]),
                *own,
                most=most,
                earliest=wanted if batch in reserved else 0,
                after=may_exceed_window,
                rng=rng,
            )
            first, use = grid.use(start, *own)
        grid.hold(first, use)
        starts[batch] = start
        if batch in reserved:
            turn = max(turn, start)
    return starts


class _Grid:
    """Hold the number of GPUs in use in each bucket of time."""

    def __init__(self, buckets: int, capacity: int) -> None:
        self.held = np.zeros(buckets, dtype=np.int64)
        self.capacity = capacity

    @staticmethod
    def use(start: int, gpus: Ints, begins: Ints, ends: Ints) -> tuple[int, Ints]:
        """Return the first bucket that a batch touches, and its GPUs from this bucket on."""
        if len(gpus) == 1:
            first = int(start + begins[0]) // BUCKET_S
            return first, np.full(int(start + ends[0]) // BUCKET_S - first + 1, gpus[0])
        rises = (start + begins) // BUCKET_S
        falls = (start + ends) // BUCKET_S + 1
        first = int(rises.min())
        length = int(falls.max()) - first + 1
        change = np.bincount(rises - first, gpus, minlength=length) - np.bincount(
            falls - first, gpus, minlength=length
        )
        return first, np.cumsum(change)[:-1].astype(np.int64)

    def fits(self, first: int, use: Ints, *, most: float) -> bool:
        return bool((self.held[first : first + len(use)] + use).max() <= most)

    def hold(self, first: int, use: Ints) -> None:
        self.held[first : first + len(use)] += use

    def search(
        self,
        wanted: int,
        latest: int,
        gpus: Ints,
        begins: Ints,
        ends: Ints,
        *,
        most: float,
        earliest: int,
        after: bool,
        rng: np.random.Generator,
    ) -> int:
        """Return a start at which every bucket has room for the batch's highest use.

        If there is no such start, the result is as described for `placed`.
        """
        # A batch that starts inside a bucket touches one more bucket.
        first, use = self.use(0, gpus, begins, ends)
        length, peak = (
            len(use) + 1,
            int(use.max()),
        )
        until = min(latest // BUCKET_S, len(self.held) - length - first - 1) + 1
        begin = first + np.arange(max(until, 1))
        for bound in (most, self.capacity):
            blocked = np.concatenate([[0], np.cumsum(self.held + peak > bound)])
            free = np.flatnonzero(blocked[begin + length] == blocked[begin])
            in_turn = free[free * BUCKET_S >= earliest]
            if len(in_turn):
                free = in_turn
            if len(free):
                away = np.abs(free - wanted // BUCKET_S)
                off_hour = np.abs((away + _DAY // 2) % _DAY - _DAY // 2)
                nearest = int(np.argmin(away + _HOURS_KEPT * off_hour))
                return int(min(free[nearest] * BUCKET_S, latest))
        if after:
            used = np.flatnonzero(self.held)
            start = int(used[-1] + 1) * BUCKET_S
            longer = start // BUCKET_S + first + length + 1 - len(self.held)
            self.held = np.pad(self.held, (0, max(longer, 0)))
            return start
        some = np.unique(rng.integers(0, latest + 1, size=200))
        above = []
        for start in some.tolist():
            at, use = self.use(start, gpus, begins, ends)
            above.append(int((self.held[at : at + len(use)] + use).max()))
        return int(some[int(np.argmin(above))])


def peak_gpus(starts_s: Ints, ends_s: Ints, gpu_nums: Ints) -> int:
    """Return the largest number of GPUs in use at the same time.

    If one job ends when another starts, its GPUs count as free for the other.
    """
    times = np.concatenate([starts_s, ends_s])
    change = np.concatenate([gpu_nums, -gpu_nums])
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max(initial=0))
