"""Compute the confidence from the rule's reliability and the margin over the next explanation.

The log odds of a correct answer are a sum of three terms: an offset, the log odds of the root's
rule, and the margin of the explanation. The offset and the rule's weight are calibrated on one kind
of noise (`benchmarks/diagnosis.py --calibrate`). A nat of margin adds less than a nat, since the
costs in `causes.yaml` are orders of likelihood.
"""

import math
from dataclasses import dataclass
from typing import Final

from holdfast.diagnose.explain.explain import OF_PEERS, Explanation, is_bare

OFFSET: Final = -3.3
OF_RULE: Final = 4.0
OF_MARGIN: Final = 0.3
_CLOSE_RIVAL: Final = 0.3
"""The share of another reason from which the answer is in doubt."""
_BARE: Final = 0.9
"""The factor for an exception without a traceback: the program may have logged and handled the
exception."""
_SURVIVED: Final = 0.8
"""The factor for an error that the job survived, judged by the order of lines."""
_LEAST: Final = 0.02
"""The least and, as 1 minus this, the greatest confidence that fifty measured logs support (rule of
succession)."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """The inputs of a confidence."""

    rule: float
    """The share of cases in which the root's rule is correct, 0 to 1."""
    margin: float
    """The log odds of the explanations with this reason against all others, in nats."""
    most: float = 1.0
    """The upper limit of the confidence."""


def support_of(explanation: Explanation) -> Support:
    """Return the support of the first of the ranked explanations."""
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
        # A rank that reports a lost peer has no evidence of the peer's failure.
        most=min(most, root.rule.confidence) if root.rule.kind in OF_PEERS else most,
    )


def sureness(support: Support, offset: float = OFFSET, of_rule: float = OF_RULE) -> float:
    """Return the share of correct answers among those with this `support`, 0 to 1."""
    odds = offset + of_rule * log_odds(support.rule) + OF_MARGIN * support.margin
    return min(max(1.0 / (1.0 + math.exp(-odds)), _LEAST), 1 - _LEAST, support.most)


def log_odds(share: float) -> float:
    """Return ln(p / (1 - p)), with p limited to the measurable range."""
    kept = min(max(share, _LEAST), 1 - _LEAST)
    return math.log(kept / (1 - kept))
