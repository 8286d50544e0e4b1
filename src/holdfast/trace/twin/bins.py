"""Define the bins of powers of two that the published curves use, and the values in a bin."""

from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.twin.model import Floats, Ints

BINS: Final = 26
"""Number of bins of seconds.

Bin 0 contains values up to 1 s, and bin i values in (2^(i-1), 2^i] s. The last bin ends at 2^25 s,
which is more than a year.
"""


def bin_of(seconds: npt.NDArray[np.number]) -> Ints:
    """Return the bin of each value in seconds; values may be fractions."""
    return np.asarray(np.ceil(np.log2(np.clip(seconds, 1, 2 ** (BINS - 1)))), dtype=np.int64)


def padded(counts: list[float] | list[int]) -> Floats:
    """Extend counts of the first bins to all bins, with zeros."""
    return np.pad(np.asarray(counts, dtype=float), (0, BINS - len(counts)))


def bin_edges(limit_s: float) -> tuple[Floats, Floats]:
    """Return the lower edges (exclusive) and the upper edges (inclusive) of all bins, in seconds.

    No upper edge exceeds `limit_s`.
    """
    upper = 2.0 ** np.arange(BINS)
    lower = np.where(upper > 1, upper / 2, 0.0)
    return lower, np.where(lower < limit_s, np.minimum(upper, limit_s), upper)


def bin_means(limit_s: float) -> Floats:
    """Return the mean of each bin in seconds, if values are log-uniform within a bin.

    This assumption is reasonable, because durations are nearly log-normal over many bins.
    """
    lower, upper = bin_edges(limit_s)
    with np.errstate(divide="ignore"):
        means = (upper - lower) / np.log(upper / np.maximum(lower, 1e-300))
    return np.where(upper <= 1, 0.7, np.where(upper == 2, 2.0, means))
