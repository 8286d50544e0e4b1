"""Compute exact intervals and tests for counts: the uncertainty of a rate, a share or an excess.

SciPy is imported on first use, because few analyses need it.
"""

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def poisson_interval(events: npt.ArrayLike, *, confidence: float = 0.95) -> tuple[Values, Values]:
    """Return the exact interval of a Poisson mean for a count of events (Garwood 1936, gamma form).

    Divide both ends by the exposure for a rate. The lower end is 0 for no events.

    Args:
        events: counts, any shape.
        confidence: 0 to 1, two-sided.
    """
    from scipy.special import gammaincinv

    counts = np.asarray(events, dtype=float)
    tail = (1 - confidence) / 2
    # The inverse is undefined for an order of 0; at 0 events the lower end is 0 by definition.
    low = np.where(counts > 0, gammaincinv(np.maximum(counts, 1e-9), tail), 0.0)
    return low, np.asarray(gammaincinv(counts + 1, 1 - tail))


def poisson_at_least(events: npt.ArrayLike, expected: npt.ArrayLike) -> Values:
    """Return P(X >= events) for a Poisson X with the mean `expected`."""
    from scipy.special import gammainc

    counts, mean = np.broadcast_arrays(
        np.asarray(events, dtype=float), np.asarray(expected, dtype=float)
    )
    return np.where(counts > 0, gammainc(np.maximum(counts, 1e-9), mean), 1.0)


def wilson_interval(
    successes: npt.ArrayLike, trials: npt.ArrayLike, *, confidence: float = 0.95
) -> tuple[Values, Values]:
    """Return the interval of a share by Wilson (1927).

    There is no continuity correction. The interval is NaN for no trials.
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
    """Return adjusted p-values of Benjamini & Hochberg (1995).

    Reject the tests with a value of at most q for a false discovery rate of q.

    Args:
        p_values: shape (tests,).
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    ranked = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
    return adjusted
