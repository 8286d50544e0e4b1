"""Stage 5: group jobs into batches of similar jobs, and order the batches in time.

Batches form campaigns, retries and bursts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.twin.model import Floats, Ints, Rhythm

_BATCH_GPUS: Final = 256
"""The most GPUs of all jobs of a batch together, or a quarter of the cluster if fewer.

A larger job is a batch by itself.
"""

_TRIED_ORDERS: Final = 300
"""Number of orders drawn if an order's statistics are known; the best one is used."""

_NEW_CAMPAIGN: Final = 1.0
"""Extra length of a gap before a new campaign, compared with a gap within a campaign.

It is added to the gap's random rank, in standard deviations.
"""


_NO_ROOM: Final = 1.0
"""Weight of the share of GPU time without room in the cluster, beside a relative error."""

_AFTER_LONG: Final = 1.0
"""Extra length of a gap after a batch with much GPU time.

It is added to the gap's random rank, per standard deviation of the rank of GPU time.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sessions:
    """Hold the batches of a draw, for N jobs and B batches.

    The batches of a type have ascending numbers, in their order.
    """

    batches: Ints
    """(N) number of each job's batch."""
    places: Ints
    """(N) index of each job within its batch, from 0."""
    types: Ints
    """(B) type of each batch."""
    campaigns: Ints
    """(B) number of each batch's campaign, ascending.

    A campaign consists of successive batches with the same user, type and size.
    """
    parts: Floats
    """(B) arrival as a share of the type's arrivals, ascending by type; unused for retries."""
    retries: npt.NDArray[np.bool_]
    """(B) True if the batch is a retry of the batch before it, which failed."""
    pauses_s: Floats
    """(B) seconds between the failure and the retry."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chain:
    """Hold the order of the jobs of one type, for M jobs and B batches."""

    jobs: Ints
    batches: Ints
    places: Ints
    campaigns: Ints
    parts: Floats
    retries: npt.NDArray[np.bool_]
    pauses_s: Floats


def in_sessions(
    types: Ints,
    gpu_nums: Ints,
    durations_s: Ints,
    completed: npt.NDArray[np.bool_],
    failed: npt.NDArray[np.bool_],
    *,
    mean_sizes: Floats,
    rhythm: Rhythm,
    capacity_gpus: int | None,
    moments_s: Callable[[Floats, int], Floats],
    rng: np.random.Generator,
) -> Sessions:
    """Group the jobs of each type into batches and campaigns, and spread the batches over time.

    Every job keeps its type, GPUs and duration. Only the order of the jobs is chosen.

    Args:
        types: (N) the type number of each job.
        gpu_nums: (N) the number of GPUs of each job.
        durations_s: (N) the duration of each job.
        completed: (N) True for completed jobs, to which the known statistics refer.
        failed: (N) True for failed jobs.
        mean_sizes: (T) the mean number of jobs in a batch.
        rhythm: the parameters of the order.
        capacity_gpus: the number of GPUs of the cluster; None if unknown.
        moments_s: returns the times in seconds at which given shares of a type's arrivals have
            come.
        rng: the random generator.
    """
    most = _BATCH_GPUS if capacity_gpus is None else min(_BATCH_GPUS, max(capacity_gpus // 4, 1))
    count = len(types)
    batches, places = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    chains: list[_Chain] = []
    type_of, campaigns = [], []
    first = first_campaign = 0
    for type_ in np.unique(types).tolist():
        members = np.flatnonzero(types == type_)
        arguments = (
            members,
            gpu_nums,
            durations_s,
            failed,
            mean_sizes[type_],
            most,
            rhythm,
            type_,
            rng,
        )
        chain = _chain(*arguments)
        known = rhythm.known.get(type_)
        if known is not None and completed[members].sum() > _MIN_COMPLETED_JOBS:
            best = np.inf
            for _ in range(_TRIED_ORDERS):
                other = _chain(*arguments)
                moments = moments_s(other.parts, type_)
                off = _distance(
                    other, moments, gpu_nums, durations_s, completed, known, capacity_gpus
                )
                if off < best:
                    chain, best = other, off
        batches[chain.jobs] = first + chain.batches
        places[chain.jobs] = chain.places
        type_of.append(np.full(len(chain.parts), type_))
        campaigns.append(first_campaign + chain.campaigns)
        chains.append(chain)
        first += len(chain.parts)
        first_campaign += int(chain.campaigns[-1]) + 1
    return Sessions(
        batches=batches,
        places=places,
        types=np.concatenate(type_of),
        campaigns=np.concatenate(campaigns),
        parts=np.concatenate([chain.parts for chain in chains]),
        retries=np.concatenate([chain.retries for chain in chains]),
        pauses_s=np.concatenate([chain.pauses_s for chain in chains]),
    )


_MIN_COMPLETED_JOBS: Final = 30
"""The fewest completed jobs for which the statistics of an order are meaningful."""


def _chain(
    members: Ints,
    gpu_nums: Ints,
    durations_s: Ints,
    failed: npt.NDArray[np.bool_],
    mean_size: float,
    most_gpus: int,
    rhythm: Rhythm,
    type_: int,
    rng: np.random.Generator,
) -> _Chain:
    number = np.repeat(*_sizes(len(members), mean_size, rng))
    count = int(number[-1]) + 1
    new = rng.random(count) >= rhythm.same_size[type_]
    new[0] = True
    campaign = np.cumsum(new) - 1
    size = _correlated(int(campaign[-1]) + 1, rhythm.near_size, rng)[campaign]
    length = _correlated(count, rhythm.near_duration[type_], rng)
    own = rhythm.alike * length[number] + (1 - rhythm.alike**2) ** 0.5 * rng.normal(
        size=len(number)
    )
    # Assign the sizes, and within each size the durations, to the positions by rank. All counts are
    # kept.
    gpus = np.empty(len(members), dtype=np.int64)
    gpus[np.lexsort((rng.random(len(number)), size[number]))] = np.sort(gpu_nums[members])
    jobs = np.empty(len(members), dtype=np.int64)
    jobs[np.lexsort((own, gpus))] = members[
        np.lexsort((rng.random(len(members)), durations_s[members], gpu_nums[members]))
    ]
    changed = (np.diff(gpus, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0)
    changed |= np.diff(np.cumsum(gpus) // most_gpus, prepend=0) != 0
    batch = np.cumsum(changed) - 1
    begins = np.flatnonzero(changed)
    campaign_of = campaign[number[begins]]
    restarted = (np.diff(campaign_of, prepend=-1) != 0) | (np.diff(gpus[begins], prepend=-1) != 0)
    gpu_time = np.add.reduceat(gpus * durations_s[jobs], begins)
    last = np.concatenate([[0], gpu_time[:-1]])
    all_failed = np.minimum.reduceat(failed[jobs], begins)
    retries = ~restarted & np.concatenate([[False], all_failed[:-1]])
    retries &= rng.random(len(begins)) < rhythm.retry_share
    return _Chain(
        jobs=jobs,
        batches=batch,
        places=np.arange(len(jobs)) - begins[batch],
        campaigns=np.cumsum(restarted) - 1,
        parts=anchored(
            _parts(restarted, _normal(last), rhythm.gap_cv2[type_], rng),
            np.append(begins[1:], len(jobs)) / len(jobs),
            rhythm.first_parts[type_],
        ),
        retries=retries,
        pauses_s=rhythm.retry_median_s * np.exp(_RETRY_SPREAD * rng.normal(size=len(begins))),
    )


def _sizes(count: int, mean: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw the sizes of batches, which sum to `count`.

    Sizes are geometric. Large batches (a checkpoint's datasets, a parameter sweep) are an
    exception, and lie within 30% of their mean.

    Returns:
        The numbers of the batches, and their sizes.
    """
    enough = int(count / mean * 1.5) + 20
    sizes = np.array([], dtype=np.int64)
    while sizes.sum() < count:
        if mean >= 20:
            more = rng.integers(round(0.7 * mean), round(1.3 * mean) + 1, size=enough)
        else:
            more = rng.geometric(1 / max(mean, 1.0), size=enough)
        sizes = np.concatenate([sizes, more])
    ends = np.minimum(np.cumsum(sizes), count)
    sizes = np.diff(ends, prepend=0)
    sizes = sizes[sizes > 0]
    return np.arange(len(sizes)), sizes


def _correlated(count: int, correlation: float, rng: np.random.Generator) -> Floats:
    """Draw a normal sequence in which neighbours have the given correlation."""
    noise = rng.normal(size=count)
    rest = (1 - correlation**2) ** 0.5
    values = noise.tolist()
    for place in range(1, count):
        values[place] = correlation * values[place - 1] + rest * values[place]
    return np.array(values)


def _normal(values: Ints) -> Floats:
    """Return the ranks of the values, with mean 0 and variance 1."""
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return np.asarray(((ranks + 0.5) / len(values) - 0.5) * 12**0.5)


def _parts(
    new: npt.NDArray[np.bool_], last: Floats, cv2: float, rng: np.random.Generator
) -> Floats:
    """Draw times in (0, 1) with log-normal gaps.

    The gaps have the squared coefficient of variation `cv2`. Long gaps tend to come before new
    campaigns, and after batches with much GPU time. The gaps are close to quantiles of the
    distribution, so that their variation is nearly the same in every draw.
    """
    count = len(new)
    order = np.argsort(rng.normal(size=count) + _NEW_CAMPAIGN * new + _AFTER_LONG * last)
    normal = np.sort(rng.normal(size=(9, count)), axis=1).mean(axis=0)
    gaps = np.empty(count)
    gaps[order] = np.exp(np.log1p(cv2) ** 0.5 * normal)
    ends = np.cumsum(gaps)
    return np.asarray((ends - gaps / 2) / ends[-1])


def anchored(parts: Floats, come: Floats, anchor: float) -> Floats:
    """Stretch the times before and after `anchor`, so that this share of the jobs has come by then.

    Args:
        parts: (B) the times of the batches in (0, 1), ascending.
        come: (B) the share of the jobs in the batches up to and including each one.
        anchor: the share of the jobs, and the time by which it must have come; 0 if unknown.
    """
    last = int(np.searchsorted(come, anchor))
    if not anchor or last >= len(parts) - 1:
        return parts
    middle = (parts[last] + parts[last + 1]) / 2
    return np.interp(parts, [0.0, middle, 1.0], [0.0, anchor, 1.0])


def _distance(
    chain: _Chain,
    moments_s: Floats,
    gpu_nums: Ints,
    durations_s: Ints,
    completed: npt.NDArray[np.bool_],
    known: tuple[float, float, float, float],
    capacity_gpus: int | None,
) -> float:
    """Return how far the statistics of an order are from their known values.

    This is the largest relative error. GPU time for which the cluster has no room is added as a
    further error, because such jobs must be moved, which changes the order.
    """
    ends_s = np.maximum.reduceat(durations_s[chain.jobs], np.flatnonzero(chain.places == 0))
    submits_s = retried(moments_s, ends_s, chain.retries, chain.pauses_s)[chain.batches]
    order = np.argsort(submits_s, kind="stable")
    order = order[completed[chain.jobs[order]]]
    jobs = chain.jobs[order]
    found = order_statistics(gpu_nums[jobs], durations_s[jobs], submits_s[order])
    error = max(abs(a / b - 1) for a, b in zip(found, known, strict=True))
    if capacity_gpus is None:
        return error
    times = np.concatenate([submits_s, submits_s + durations_s[chain.jobs]])
    change = np.concatenate([gpu_nums[chain.jobs], -gpu_nums[chain.jobs]])
    by_time = np.argsort(times, kind="stable")
    held = np.cumsum(change[by_time])[:-1]
    lasting = np.diff(times[by_time])
    excess = (np.maximum(held - capacity_gpus, 0) * lasting).sum() / (held * lasting).sum()
    return error + _NO_ROOM * float(excess)


def order_statistics(
    gpu_nums: npt.NDArray[np.number],
    durations_s: npt.NDArray[np.number],
    moments: npt.NDArray[np.number],
) -> tuple[float, float, float, float]:
    """Return four statistics of jobs in the order of submission.

    - the share of jobs with as many GPUs as the previous job
    - the correlation between log GPUs of successive jobs
    - the correlation between log durations of successive jobs
    - the squared coefficient of variation of the gaps between submissions
    """
    gaps = np.diff(moments)
    return (
        float((np.diff(gpu_nums) == 0).mean()),
        lagged(np.log(gpu_nums)),
        lagged(np.log(np.maximum(durations_s, 1))),
        float(gaps.var() / max(gaps.mean(), 1e-12) ** 2),
    )


def lagged(values: npt.NDArray[np.number], lag: int = 1) -> float:
    """Return the autocorrelation of a sequence at a lag; 0 if the sequence is constant."""
    before, after = values[:-lag], values[lag:]
    if len(before) < 2 or not before.std() or not after.std():
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def retried(
    moments_s: Floats, ends_s: Ints, retries: npt.NDArray[np.bool_], pauses_s: Floats
) -> Floats:
    """Return the times of the batches, after each retry was moved behind the batch that it retries.

    A retry comes one pause after the end of the batch before it.

    Args:
        moments_s: (B) the times of the batches, in seconds from the start of the window.
        ends_s: (B) seconds from the time of a batch to the end of its last job.
        retries: (B) True for batches that retry the batch before them.
        pauses_s: (B) the pauses in seconds.
    """
    moved = moments_s.copy()
    for batch in np.flatnonzero(retries).tolist():
        moved[batch] = moved[batch - 1] + ends_s[batch - 1] + pauses_s[batch]
    return moved


_RETRY_SPREAD: Final = 0.7
"""Standard deviation of the logarithm of the pause before a retry (chosen)."""
