"""Stage 6: draw the rate of arrivals over the time window, and compute the resulting load.

The arrivals of a type may also drift towards the start or the end of the window.
"""

from datetime import datetime, timedelta
from typing import Final

import numpy as np

from holdfast.trace.twin.model import Floats, Ints

BUCKET_S: Final = 300
"""Seconds of one bucket of the time grid, on which arrivals are drawn and GPUs are counted."""

_SPACING_S: Final = 3.0
"""Mean seconds between submissions of a script; the released rows have 0 to 3 s."""


def offsets_s(places: Ints, batches: Ints, rng: np.random.Generator) -> Ints:
    """Draw the time of each submission, in seconds from the start of its batch."""
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
    """Return the share of arrivals in each bucket of the time window.

    The share is proportional to the weekly pattern times a random rate for each day. The logarithm
    of this rate is a first-order autoregressive process.
    """
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


def moments_s(parts: Floats, drift: float, rate: Floats, window_s: float) -> Floats:
    """Return when the batches of one type arrive, in seconds from the start of the window.

    Args:
        parts: for each batch, the share of the type's arrivals that come before it.
        drift: an exponent that moves arrivals towards the start or the end; see `Rhythm.drift`.
        rate: the share of arrivals in each bucket.
        window_s: the length of the window in seconds.
    """
    ends = np.linspace(0.0, window_s, len(rate) + 1)
    come = np.concatenate([[0.0], np.cumsum(rate)])
    return np.asarray(np.interp(parts, (come / come[-1]) ** drift, ends))


def load_at(moments: Floats, begins_s: Floats, ends_s: Floats, gpu_nums: Ints) -> Floats:
    """Return the GPUs in use at each of the given moments, if every job runs at the given times.

    Times are rounded to buckets of `BUCKET_S`.
    """
    first, last = (
        np.maximum(times // BUCKET_S, 0).astype(np.int64) for times in (begins_s, ends_s)
    )
    length = int(max(last.max(initial=0), moments.max(initial=0) // BUCKET_S)) + 2
    change = np.bincount(first, gpu_nums, minlength=length) - np.bincount(
        last + 1, gpu_nums, minlength=length
    )
    return np.asarray(np.cumsum(change)[(moments // BUCKET_S).astype(np.int64)])
