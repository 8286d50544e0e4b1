"""How sure an answer is: what its rule is worth, and by how much its explanation beats the next one.

The log odds of a right answer are a sum of three terms: an offset, the log odds of the root's rule, and the margin of
the explanation. The offset and the weight of the rule are measured on one make of noise (`benchmarks/diagnosis.py
--calibrate`). A nat of margin counts for less than a nat, since the costs of `causes.yaml` are orders of likelihood.
"""

import math
from dataclasses import dataclass
from typing import Final

from holdfast.diagnose.explain.explain import OF_PEERS, Explanation, is_bare

OFFSET: Final = -3.3
OF_RULE: Final = 4.0
OF_MARGIN: Final = 0.3
_CLOSE_RIVAL: Final = 0.3
"""Share of another reason from which on the answer is in doubt."""
_BARE: Final = 0.9
"""For an exception without a traceback: the program may have logged and handled it."""
_SURVIVED: Final = 0.8
"""For an error after which the job went on, as far as the order of lines shows."""
_LEAST: Final = 0.02
"""What is measured on fifty logs is never surer than 0.98, nor less sure than this (the rule of succession)."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """What speaks for an answer, before it is weighed."""

    rule: float
    """How often the rule of the root is right where it states the root, 0 to 1."""
    margin: float
    """The log odds of the explanations with this reason against all others, nats."""
    most: float = 1.0
    """How sure one can be at most, whatever the two say."""


def support_of(explanation: Explanation) -> Support:
    """Return what speaks for the first of the ranked explanations."""
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
        # Who reports a lost peer does not know what befell the peer.
        most=min(most, root.rule.confidence) if root.rule.kind in OF_PEERS else most,
    )


def sureness(support: Support, offset: float = OFFSET, of_rule: float = OF_RULE) -> float:
    """Return the share of right answers among those with such `support`, 0 to 1."""
    odds = offset + of_rule * log_odds(support.rule) + OF_MARGIN * support.margin
    return min(max(1.0 / (1.0 + math.exp(-odds)), _LEAST), 1 - _LEAST, support.most)


def log_odds(share: float) -> float:
    """Return ln(p / (1 - p)), of a share of 0 or 1 that of the nearest share that was measured."""
    kept = min(max(share, _LEAST), 1 - _LEAST)
    return math.log(kept / (1 - kept))
