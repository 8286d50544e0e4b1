"""Stage 3: draw seconds within the bins, such that the given totals and medians are met."""

from typing import Final

import numpy as np

from holdfast.trace.twin.bins import bin_edges
from holdfast.trace.twin.model import Floats, Ints

_MOVABLE: Final = 9
"""The first bin (above 256 s) whose values may move to meet totals.

Smaller values stay, because they determine the medians.
"""


def drawn_values(
    bins: Ints,
    groups: Ints,
    limit_s: Floats,
    target_s: Floats,
    rng: np.random.Generator,
    longest: int | None = None,
) -> Ints:
    """Draw whole seconds, each within its bin, such that every group sums to its target.

    The values are log-uniform at first, and then moved towards one edge of their bins.

    Args:
        bins: the bin of each job.
        groups: the group of each job, in any order.
        limit_s: the largest possible value of each job.
        target_s: the target of each group; NaN for no target. A target that cannot be met within
            the bins is missed.
        rng: the random generator.
        longest: the index of the job whose value is exactly its limit.
    """
    lower, upper = _edges(bins, limit_s)
    place = 1.0 - rng.random(len(bins))
    with np.errstate(divide="ignore"):
        span = np.log(upper / np.maximum(lower, 1e-9))
    values = np.ceil(np.maximum(lower * np.exp(span * place), lower + 1e-6))
    values = np.where(bins == 0, rng.random(len(bins)) < 0.7, np.clip(values, lower + 1, upper))
    movable = bins >= _MOVABLE
    if longest is not None:
        values[longest] = limit_s[longest]
        movable[longest] = False
    moving = np.flatnonzero(movable)
    own = groups[moving]
    fixed = np.bincount(groups[~movable], values[~movable], minlength=len(target_s))
    wanted = target_s - fixed
    low, high = np.full(len(target_s), -2.2), np.full(len(target_s), 2.2)
    start, reach, log_place = lower[moving], span[moving], np.log(place[moving])
    for _ in range(26):
        bend = (low + high) / 2
        moved = start * np.exp(reach * np.exp(np.exp(bend)[own] * log_place))
        # A larger bend moves values towards the lower edge.
        too_much = np.bincount(own, moved, minlength=len(target_s)) > wanted
        low, high = np.where(too_much, bend, low), np.where(too_much, high, bend)
    free = np.isnan(target_s)[own]
    moved = np.clip(np.ceil(moved), start + 1, upper[moving])
    values[moving] = np.where(free, values[moving], moved)
    return values.astype(np.int64)


def shifted_to_totals(
    values: Ints,
    bins: Ints,
    limit_s: Floats,
    weights: Floats,
    margins: list[tuple[Ints, Floats]],
    *,
    keep: int | None = None,
    rounds: int = 6,
) -> Ints:
    """Move values within their bins until the weighted sums of all groups meet their targets.

    Args:
        values: the values in whole seconds.
        bins: the bin of each value.
        limit_s: the largest possible value of each.
        weights: the weight of each value in the sums, such as its GPUs.
        margins: for each margin, the group of each value, and the target of each group; NaN for no
            target.
        keep: the index of a value that does not change.
        rounds: the number of passes over the margins.
    """
    lower, upper = _edges(bins, limit_s)
    moved = values.astype(float)
    movable = bins >= _MOVABLE
    if keep is not None:
        movable[keep] = False
    for _ in range(rounds):
        for groups, target in margins:
            missing = np.nan_to_num(
                target - np.bincount(groups, weights * moved, minlength=len(target))
            )
            up = (missing > 0)[groups]
            room = np.where(up, upper - moved, moved - lower - 1) * movable
            available = np.bincount(groups, weights * room, minlength=len(target))
            part = np.divide(
                np.abs(missing), available, out=np.zeros_like(missing), where=available > 0
            )
            moved += np.where(up, 1.0, -1.0) * np.minimum(part, 0.9)[groups] * room
    return np.asarray(
        np.clip(np.rint(moved), np.where(bins == 0, 0, lower + 1), upper), dtype=np.int64
    )


def with_median(values: Ints, bins: Ints, median_s: float) -> Ints:
    """Move the values within the median's bin so that the median is exactly `median_s`.

    If the number of values is even, both middle values become `median_s`.
    """
    if not len(values):
        return values
    order = np.argsort(values, kind="stable")
    middle = {(len(values) - 1) // 2, len(values) // 2}
    bin_ = int(np.ceil(np.log2(max(median_s, 1))))
    if any(bins[order[place]] != bin_ for place in middle) or bin_ < 2:
        return values  # By the counts of the bins, the median lies in another bin.
    lower, upper = 2.0 ** (bin_ - 1), 2.0**bin_
    moved = values.copy()
    members = order[bins[order] == bin_]
    first = int(np.flatnonzero(bins[order] == bin_)[0])
    rank = (min(middle) + max(middle)) / 2 - first
    ranks = np.arange(len(members))
    below = ranks <= rank
    wanted = np.log2(median_s / lower)
    here = np.log2(np.clip(values[members] / lower, 1.0, 2.0))
    pivot = max(np.log2(values[members[round(rank)]] / lower), 1e-3)
    bent = np.where(
        below, here * wanted / pivot, wanted + (here - pivot) * (1 - wanted) / max(1 - pivot, 1e-3)
    )
    new = np.clip(np.rint(lower * 2.0**bent), lower + 1, upper)
    new = np.where(below, np.minimum(new, median_s), np.maximum(new, median_s))
    new[[place - first for place in middle]] = median_s
    moved[members] = new.astype(np.int64)
    return moved


def _edges(bins: Ints, limit_s: Floats) -> tuple[Floats, Floats]:
    lower, upper = bin_edges(np.inf)
    low = lower[bins]
    high = upper[bins]
    return low, np.where(low < limit_s, np.minimum(high, limit_s), high)
