"""Compute exact distributions from value counts: CDF, quantiles, means, box numbers.

Value counts are merged by addition, so the distribution over a hundred files is exact. An
approximation such as a t-digest would interpolate between idle and busy GPUs, and report a median
that no GPU had.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Hold distinct values in ascending order, and the weight of each (a count, or GPU time)."""

    values: Values
    weights: Values

    @classmethod
    def of(cls, values: npt.ArrayLike, weights: npt.ArrayLike) -> "Distribution":
        """Build a distribution from value counts in any order.

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
        """Return the sum of the weights, which is n if the weights are counts."""
        return float(self.weights.sum())

    @property
    def mean(self) -> float:
        """Return the weighted mean; NaN if the distribution is empty."""
        return (
            float((self.values * self.weights).sum() / self.total)
            if len(self.values)
            else float("nan")
        )

    def at_most(self, values: npt.ArrayLike) -> Values:
        """For each of `values`, return the share of the weight (0 to 1) at or below the value."""
        cumulative = np.concatenate([[0.0], np.cumsum(self.weights)])
        return np.asarray(
            cumulative[np.searchsorted(self.values, values, side="right")] / max(self.total, 1e-300)
        )

    def quantile(self, share: npt.ArrayLike) -> Values:
        """Return quantiles by NumPy's default method, linear interpolation between data.

        The weights must be counts. The result is NaN if the distribution is empty.
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
        """Return the smallest value with at least `share` of the weight at or below it.

        Unlike `quantile`, this works for any weights. For example, half of the GPU time is in jobs
        of at most `reached(0.5)`. The result is NaN if the distribution is empty.
        """
        if not len(self.values):
            return float("nan")
        cumulative = np.cumsum(self.weights)
        place = int(np.searchsorted(cumulative, share * cumulative[-1], side="left"))
        return float(self.values[min(place, len(self.values) - 1)])

    @property
    def median(self) -> float:
        """Return the median of counted data; NaN if the distribution is empty."""
        return float(self.quantile(0.5))

    def curve(self, points: int = 300, *, log: bool = False) -> tuple[Values, Values]:
        """Return the empirical CDF as a step curve: values x, and the share at or below x.

        The curve has about `points` vertices, and each lies on the exact CDF. If there are more
        distinct values than `points`, the vertices are spread evenly both in x (or log x) and in
        share. No vertical jump and no tail is lost.
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
        """Return the five numbers of a box plot, of shape (5,).

        These are the lower whisker, the three quartiles and the upper whisker. The whiskers end at
        the furthest value within 1.5 IQR of the box (Tukey).
        """
        q1, median, q3 = self.quantile([0.25, 0.5, 0.75])
        reach = 1.5 * (q3 - q1)
        inside = self.values[(self.values >= q1 - reach) & (self.values <= q3 + reach)]
        low, high = (inside[0], inside[-1]) if len(inside) else (np.nan, np.nan)
        # With few values, a quartile is interpolated and may lie beyond the last value within
        # reach.
        return np.array([min(low, q1), q1, median, q3, max(high, q3)])
