"""Find the batches that led to a NaN or a spike of the loss.

The input is the loss and the batches that the rank with this loss reported for each step. The
result is the batches of the last step with an ordinary loss, and all later batches up to the step
at which the anomaly became certain. The last ordinary step is included because the loss of a step
is computed before the step updates the weights. So if a batch's gradient breaks the weights, this
is visible only in the loss of the next step. A step may have any number of batches, for example
with accumulated gradients.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.core.left_out import MAX_NUMBER
from holdfast.core.whole import whole_number
from holdfast.recover.detectors.anomaly import NOT_FINITE_STEPS, RISE_STEPS, SPIKE_STEPS

_KEPT = RISE_STEPS + NOT_FINITE_STEPS + SPIKE_STEPS
"""The number of steps with a loss that are kept for each rank: the consecutive steps that show an
anomaly, and the step before."""


class _Step(NamedTuple):
    step: int
    first: int
    """The first batch since the previous report."""
    last: int


class Trail:
    """The batches of the last steps of each rank."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[_Step]] = {}

    def restarted(self) -> None:
        """Forget all steps, since an attempt begins."""
        self._steps.clear()

    def took(self, rank: int, message: Mapping[str, Any]) -> None:
        """Record a rank's report of a step, if it has a loss and batches.

        Raises:
            ValueError: the batches in the report are not a valid range.
        """
        batches = message.get("batches")
        if batches is None or message["loss"] is None:
            return
        first, last = map(whole_number, batches)
        if first is None or last is None or not 0 < first <= last <= MAX_NUMBER:
            raise ValueError(f"batches {batches!r}: give the first and the last, from 1 on")
        steps = self._steps.setdefault(rank, deque(maxlen=_KEPT))
        steps.append(_Step(int(message["step"]), first, last))

    def leading_to(self, rank: int, first_step: int, step: int) -> tuple[int, int] | None:
        """Return the first and the last of the batches that led to a broken loss; None if unknown.

        Args:
            rank: the rank whose losses show the anomaly.
            first_step: the first of the consecutive steps that show the anomaly.
            step: the step at which the anomaly became certain.
        """
        steps = [one for one in self._steps.get(rank, ()) if one.step <= step]
        ordinary = [one for one in steps if one.step < first_step]
        broken = [one for one in steps if one.step >= first_step]
        if not broken:
            return None
        begin, end = (ordinary[-1] if ordinary else broken[0]).first, broken[-1].last
        return (begin, end) if begin <= end else None
