"""How sure: a raw score to the share of answers with that score that are right.

The steps are measured on the laboratory's logs (`benchmarks/diagnosis.py --calibrate` prints them); between two steps
the line is straight.
"""

import bisect
from typing import Final

STEPS: Final[tuple[tuple[float, float], ...]] = ((0.0, 0.05), (0.3, 0.3), (0.6, 0.6), (0.9, 0.9), (1.0, 0.98))
"""Raw score and measured share of right answers, both increasing."""


def calibrated(raw: float) -> float:
    """The share of right answers among those with the score `raw` (0 to 1)."""
    at = min(max(raw, STEPS[0][0]), STEPS[-1][0])
    right = min(max(bisect.bisect_right([score for score, _ in STEPS], at), 1), len(STEPS) - 1)
    (low, low_share), (high, high_share) = STEPS[right - 1], STEPS[right]
    return low_share + (high_share - low_share) * (at - low) / (high - low)
