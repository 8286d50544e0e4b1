"""How sure: a raw score to the share of answers with that score that are right.

The steps are measured on the laboratory's logs (`benchmarks/diagnosis.py --calibrate` prints them); between two steps
the line is straight.
"""

import bisect
from typing import Final

STEPS: Final[tuple[tuple[float, float], ...]] = (
    (0.0, 0.04), (0.2, 0.05), (0.34, 0.23), (0.4, 0.7), (0.59, 0.85), (0.77, 0.95), (0.89, 0.97), (1.0, 0.98),
)  # fmt: skip
"""Raw score and measured share of right answers, both increasing."""


def calibrated(raw: float) -> float:
    """The share of right answers among those with the score `raw` (0 to 1)."""
    at = min(max(raw, STEPS[0][0]), STEPS[-1][0])
    right = min(max(bisect.bisect_right([score for score, _ in STEPS], at), 1), len(STEPS) - 1)
    (low, low_share), (high, high_share) = STEPS[right - 1], STEPS[right]
    return low_share + (high_share - low_share) * (at - low) / (high - low)
