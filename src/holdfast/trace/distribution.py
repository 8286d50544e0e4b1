"""Compute exact distributions from value counts: CDF, quantiles, means, box numbers.

Value counts merge by addition, so the distribution over a hundred files is exact. A t-digest would
interpolate between idle and busy GPUs and give a median that no GPU had.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Distinct values in ascending order and the weight of each (a count, or GPU time)."""

    values: Values
    weights: Values

    @classmethod
    def of(cls, values: npt.ArrayLike, weights: npt.ArrayLike) -> "Distribution":
        """Make a distribution from value counts in any order.

        NaN values and weights of 0 are left out.
        """
        values, weights = np.asarray(values, dtype=float), np.asarray(weights, dtype=float)
        keep = ~np.isnan(values) & (weights > 0)
        distinct, where = np.unique(values[keep], return_inverse=True)
        return cls(
            distinct,
            np.bincount(where, weights=weights[keep], minlength=len(distinct)).astype(float),
        )

    @property
    def total(self) -> float:
        """Sum of the weights: n if the weights are counts."""
        return float(self.weights.sum())

    @property
    def mean(self) -> float:
        """Weighted mean; NaN if empty."""
        return (
            float((self.values * self.weights).sum() / self.total)
            if len(self.values)
            else float("nan")
        )

    def at_most(self, values: npt.ArrayLike) -> Values:
        """Return the share of the weight (0 to 1) that is at most each of `values`."""
        cumulative = np.concatenate([[0.0], np.cumsum(self.weights)])
        return np.asarray(
            cumulative[np.searchsorted(self.values, values, side="right")] / max(self.total, 1e-300)
        )

    def quantile(self, share: npt.ArrayLike) -> Values:
        """Return quantiles by NumPy's default, linear interpolation between data.

        The weights must be counts. NaN if empty.
        """
        if not len(self.values):
            return np.full(np.shape(share), np.nan)
        ranks = np.cumsum(self.weights)
        position = np.asarray(share, dtype=float) * (ranks[-1] - 1)
        below = np.floor(position)
        left = self.values[np.searchsorted(ranks, below, side="right")]
        right = self.values[
            np.minimum(np.searchsorted(ranks, below + 1, side="right"), len(self.values) - 1)
        ]
        return np.asarray(left + (right - left) * (position - below))

    def reached(self, share: float) -> float:
        """Return the least value with at least `share` of the weight at or below it; NaN if empty.

        This quantile works for any weights: half of the GPU time is in jobs of at most
        `reached(0.5)`.
        """
        if not len(self.values):
            return float("nan")
        cumulative = np.cumsum(self.weights)
        place = int(np.searchsorted(cumulative, share * cumulative[-1], side="left"))
        return float(self.values[min(place, len(self.values) - 1)])

    @property
    def median(self) -> float:
        """Median of counted data; NaN if empty."""
        return float(self.quantile(0.5))

    def curve(self, points: int = 300, *, log: bool = False) -> tuple[Values, Values]:
        """Return the empirical CDF as a step curve (x, share at most x).

        The curve has about `points` vertices, each on the exact CDF. If there are more distinct
        values than `points`, the kept ones are evenly spread in x (in log x) and in share, so no
        vertical jump and no tail is lost.
        """
        shares = np.cumsum(self.weights) / max(self.total, 1e-300)
        if len(self.values) <= points:
            return self.values, shares
        scaled = np.log10(np.maximum(self.values, 1e-3)) if log else self.values
        spread = np.linspace(scaled[0], scaled[-1], points // 2)
        keep = np.union1d(
            np.clip(np.searchsorted(scaled, spread, side="right") - 1, 0, None),
            np.searchsorted(shares, np.linspace(0, 1, points // 2)).clip(0, len(shares) - 1),
        )
        return self.values[keep], shares[keep]

    def box(self) -> Values:
        """Return whisker, quartiles and whisker, shape (5,).

        The whiskers are at the furthest datum within 1.5 IQR (Tukey).
        """
        q1, median, q3 = self.quantile([0.25, 0.5, 0.75])
        reach = 1.5 * (q3 - q1)
        inside = self.values[(self.values >= q1 - reach) & (self.values <= q3 + reach)]
        low, high = (inside[0], inside[-1]) if len(inside) else (np.nan, np.nan)
        # With few data a quartile may lie between two data, beyond the last datum in reach.
        return np.array([min(low, q1), q1, median, q3, max(high, q3)])
