"""Compute exact intervals and tests for counts, to show how uncertain a rate or share is.

SciPy is imported on first use, because few analyses need it.
"""

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def poisson_interval(events: npt.ArrayLike, *, confidence: float = 0.95) -> tuple[Values, Values]:
    """Return the exact interval of a Poisson mean, given a number of events.

    The interval is Garwood's (1936) in its gamma form. Its lower end is 0 if there are no events.
    Divide both ends by the exposure to get the interval of a rate.

    Args:
        events: counts, of any shape.
        confidence: two-sided confidence level, 0 to 1.
    """
    from scipy.special import gammaincinv

    counts = np.asarray(events, dtype=float)
    tail = (1 - confidence) / 2
    # The inverse is undefined for an order of 0; at 0 events the lower end is 0 by definition.
    low = np.where(counts > 0, gammaincinv(np.maximum(counts, 1e-9), tail), 0.0)
    return low, np.asarray(gammaincinv(counts + 1, 1 - tail))


def poisson_at_least(events: npt.ArrayLike, expected: npt.ArrayLike) -> Values:
    """Return P(X >= events), where X is Poisson with mean `expected`."""
    from scipy.special import gammainc

    counts, mean = np.broadcast_arrays(
        np.asarray(events, dtype=float), np.asarray(expected, dtype=float)
    )
    return np.where(counts > 0, gammainc(np.maximum(counts, 1e-9), mean), 1.0)


def wilson_interval(
    successes: npt.ArrayLike, trials: npt.ArrayLike, *, confidence: float = 0.95
) -> tuple[Values, Values]:
    """Return the confidence interval of a share, by Wilson (1927).

    There is no continuity correction. The interval is NaN if there are no trials.
    """
    from scipy.special import ndtri

    hits, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    z = float(ndtri((1 + confidence) / 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = hits / n
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def false_discovery_rates(p_values: npt.ArrayLike) -> Values:
    """Return p-values adjusted for a false discovery rate, by Benjamini & Hochberg (1995).

    To keep the false discovery rate at q, reject the tests whose adjusted value is at most q.

    Args:
        p_values: the p-values, of shape (tests,).
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    ranked = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
    return adjusted
