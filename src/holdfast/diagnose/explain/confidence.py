"""Compute the confidence in a diagnosis.

The log odds of a correct answer are a sum of three terms: an offset, the weighted log odds of the
rule that matched the root, and the weighted margin over the explanations with other reasons. The
offset and the weight of the rule are calibrated on one kind of noise (`benchmarks/diagnosis.py
--calibrate`). The weight of the margin is below 1, since the costs in `causes.yaml` are only
estimates of the order of magnitude.
"""

import math
from dataclasses import dataclass
from typing import Final

from holdfast.diagnose.explain.explain import OF_PEERS, Explanation, is_bare

OFFSET: Final = -3.3
OF_RULE: Final = 4.0
OF_MARGIN: Final = 0.3
_CLOSE_RIVAL: Final = 0.3
"""The answer is in doubt if another reason has at least this share of the likelihood."""
_BARE: Final = 0.9
"""The factor on the confidence of the rule for an exception without a traceback, which the program
may have logged and handled."""
_SURVIVED: Final = 0.8
"""The factor on the confidence of the rule for an error that the job survived, as far as the order
of lines shows.
"""
_LEAST: Final = 0.02
"""The smallest confidence that the measurements on fifty logs support (rule of succession). The
greatest confidence is 1 minus this number."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """The inputs from which a confidence is computed."""

    rule: float
    """The share of cases in which the rule that matched the root is correct, 0 to 1."""
    margin: float
    """The log odds of the explanations with this reason against all other explanations, in nats."""
    most: float = 1.0
    """The upper limit of the confidence."""


def support_of(explanation: Explanation) -> Support:
    """Return the support of the most likely explanation."""
    root = explanation.ranked[0].first
    shares = {reason: share for reason, (share, _) in explanation.by_reason.items()}
    share = shares.pop(root.rule.reason)
    rival = max(shares.values(), default=0.0)
    most = 1.0 if rival < _CLOSE_RIVAL else 1.0 - rival
    return Support(
        rule=root.rule.confidence
        * (_BARE if root.rule.kind == "exception" and is_bare(root) else 1.0)
        * (_SURVIVED if root.recovered else 1.0),
        margin=log_odds(share),
        # A rank that reports a lost peer has no evidence of why the peer failed.
        most=min(most, root.rule.confidence) if root.rule.kind in OF_PEERS else most,
    )


def sureness(support: Support, offset: float = OFFSET, of_rule: float = OF_RULE) -> float:
    """Return the expected share of correct answers among all answers with this `support`, 0 to 1."""
    odds = offset + of_rule * log_odds(support.rule) + OF_MARGIN * support.margin
    return min(max(1.0 / (1.0 + math.exp(-odds)), _LEAST), 1 - _LEAST, support.most)


def log_odds(share: float) -> float:
    """Return ln(p / (1 - p)) for p = `share`, limited to the measurable range."""
    kept = min(max(share, _LEAST), 1 - _LEAST)
    return math.log(kept / (1 - kept))
