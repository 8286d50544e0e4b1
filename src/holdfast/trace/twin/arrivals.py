"""Stage 5: who comes together, and when a moment is likely: batches, and the rate of arrivals over the window."""

from datetime import datetime, timedelta
from typing import Final

import numpy as np

from holdfast.trace.twin.model import Floats, Ints

BUCKET_S: Final = 300
"""Step of the grid on which arrivals are drawn and GPUs are counted."""

_SPACING_S: Final = 3.0
"""Between jobs that one script submits (the released rows of one user come 0-3 s apart)."""


_BATCH_GPUS: Final = 256
"""A batch asks for about so many GPUs, or a quarter of the cluster, at most; who asks for more sends single jobs."""


def batched(
    types: Ints,
    gpu_nums: Ints,
    mean_sizes: Floats,
    capacity_gpus: int | None,
    rng: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Number of each job's batch and its place there, 0 first; jobs of a batch are of one type and near in GPUs.

    Sizes are geometric, except that large batches (a checkpoint's datasets, a sweep) lie within 30% of their mean.
    """
    most = _BATCH_GPUS if capacity_gpus is None else min(_BATCH_GPUS, max(capacity_gpus // 4, 1))
    batches = np.empty(len(types), dtype=np.int64)
    places = np.empty(len(types), dtype=np.int64)
    first = 0
    for type_ in np.unique(types):
        members = np.flatnonzero(types == type_)
        members = members[np.lexsort((rng.random(len(members)), gpu_nums[members]))]
        mean = mean_sizes[type_]
        enough = int(len(members) / mean * 1.5) + 20
        sizes = np.array([], dtype=np.int64)
        while sizes.sum() < len(members):
            if mean >= 20:
                more = rng.integers(round(0.7 * mean), round(1.3 * mean) + 1, size=enough)
            else:
                more = rng.geometric(1 / max(mean, 1.0), size=enough)
            sizes = np.concatenate([sizes, more])
        ends = np.cumsum(sizes)
        number = np.searchsorted(ends, np.arange(len(members)), side="right")
        part = np.cumsum(gpu_nums[members]) // most
        begins = (np.diff(number, prepend=-1) != 0) | (np.diff(part, prepend=0) != 0)
        number = np.cumsum(begins) - 1
        batches[members] = first + number
        places[members] = np.arange(len(members)) - np.flatnonzero(begins)[number]
        first += int(number[-1]) + 1
    return batches, places


def offsets_s(places: Ints, batches: Ints, rng: np.random.Generator) -> Ints:
    """Seconds from the start of its batch to each submission."""
    steps = np.where(places > 0, rng.exponential(_SPACING_S, size=len(places)), 0.0)
    order = np.lexsort((places, batches))
    run = np.cumsum(steps[order])
    starts = places[order] == 0
    base = run[starts][np.cumsum(starts) - 1]
    offsets = np.empty(len(places))
    offsets[order] = run - base
    return np.floor(offsets).astype(np.int64)


def arrival_rate(
    start_s: float,
    window_s: float,
    zone: str,
    hour_of_week: Floats,
    dispersion: float,
    rng: np.random.Generator,
) -> Floats:
    """Share of arrivals of each bucket: the week's pattern, times a day's rate whose logarithm wanders (AR(1))."""
    buckets = max(int(window_s // BUCKET_S), 1)
    offset = datetime.fromisoformat(f"2023-01-01T00:00:00{zone}").utcoffset() or timedelta(0)
    local_s = start_s + offset.total_seconds() + BUCKET_S * (np.arange(buckets) + 0.5)
    # 1970-01-01 was a Thursday: three days after Monday.
    week_hour = (local_s // 3600 + 72).astype(np.int64) % 168
    days = (local_s // 86400).astype(np.int64)
    days -= days[0]
    noise = rng.normal(size=int(days[-1]) + 1)
    level = np.empty_like(noise)
    level[0] = noise[0]
    for day in range(1, len(noise)):
        level[day] = 0.6 * level[day - 1] + 0.8 * noise[day]
    rate = hour_of_week[week_hour] * np.exp(dispersion * level[days])
    return np.asarray(rate / rate.sum())
