"""Find a loss that is not a finite number, or that stays far above its usual values.

One step alone proves nothing: a script may itself leave out a step whose loss is NaN, and single outliers are noise. So
an anomaly needs a second sign: a second rank at the same step, or the same at `NOT_FINITE_STEPS` or `SPIKE_STEPS` steps
in a row.

A loss is compared with the median and the median absolute deviation of the last `WINDOW` ordinary steps (robust
statistics: Rousseeuw and Croux, JASA 88, 1993), never with the loss before. Until `LEAST_STEPS` are known, as in the
warm-up, only losses that are not finite count. A falling loss, and a learning rate that changes, widen the deviation
and so make the comparison less strict.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

WINDOW = 256
LEAST_STEPS = 64
NOT_FINITE_STEPS = 2
SPIKE_STEPS = 3
DEVIATIONS = 8.0
"""So many standard deviations above the median; losses have heavy tails."""
LEAST_RISE = 0.25
"""A spike is at least so large a part of the median above the median: other data may raise a loss a little for long."""
NORMAL = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A loss that shows that the state of the training is broken."""

    kind: Literal["not finite", "spike"]
    first_step: int
    """The first of the steps in a row that show the anomaly."""
    step: int
    """The step at which the anomaly was certain."""
    value: float
    """The loss of that step."""
    usual: float | None = None
    """The median of ordinary losses; None where too few are known."""
    limit: float | None = None
    """The lowest loss that would have been a spike; None likewise."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; JSON has no NaN and no infinity."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**asdict(self), "value": value}


class AnomalyDetector:
    """Receives the losses of one run, also across its attempts."""

    def __init__(self) -> None:
        self._ordinary: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._high: list[int] = []
        """Steps in a row whose loss was not ordinary."""
        self._not_finite: dict[int, list[int]] = {}
        """For each rank, its last steps in a row whose loss was not finite."""

    def restarted(self, start_step: int) -> None:
        """Forget all steps after `start_step`, since the job makes them again."""
        kept = [one for one in self._ordinary if one[0] <= start_step]
        self._ordinary = deque(kept, maxlen=WINDOW)
        self._forget_signs()

    def accept(self) -> None:
        """Learn anew which losses are usual: the job goes on at the level that it has reached."""
        self._ordinary.clear()
        self._forget_signs()

    @property
    def is_calm(self) -> bool:
        """Whether no sign of an anomaly is there."""
        return not self._high and not self._not_finite

    def look(self, rank: int, step: int, loss: float | None, *, leads: bool) -> Anomaly | None:
        """Take in the loss of a rank's step; return the anomaly that is certain with this step.

        Args:
            rank: the reporting rank.
            step: steps completed.
            loss: None where the rank reports no loss.
            leads: whether spikes are looked for in this rank's losses; in those of one rank alone, since the losses of
                different ranks differ.
        """
        if loss is None:
            return None
        if not math.isfinite(loss):
            return self._look_at_not_finite(rank, step, loss)
        self._not_finite.pop(rank, None)
        return self._look_at_level(step, loss) if leads else None

    def _look_at_not_finite(self, rank: int, step: int, loss: float) -> Anomaly | None:
        own = self._not_finite.setdefault(rank, [])
        own.append(step)
        others = [one for other, one in self._not_finite.items() if other != rank and step in one]
        if len(own) < NOT_FINITE_STEPS and not others:
            return None
        first_step = min(steps[0] for steps in (own, *others))
        self._forget_signs()
        return Anomaly(
            kind="not finite", first_step=first_step, step=step, value=loss, usual=self._usual()[0]
        )

    def _look_at_level(self, step: int, loss: float) -> Anomaly | None:
        usual, limit = self._usual()
        if limit is None or loss < limit:
            self._high.clear()
            self._ordinary.append((step, loss))
            return None
        self._high.append(step)
        if len(self._high) < SPIKE_STEPS:
            return None
        first_step = self._high[0]
        self._forget_signs()
        return Anomaly(
            kind="spike", first_step=first_step, step=step, value=loss, usual=usual, limit=limit
        )

    def _forget_signs(self) -> None:
        self._high.clear()
        self._not_finite.clear()

    def _usual(self) -> tuple[float | None, float | None]:
        """Return the median of ordinary losses, and the limit of a spike; None where too few are known."""
        if len(self._ordinary) < LEAST_STEPS:
            return None, None
        losses = [loss for _, loss in self._ordinary]
        middle = median(losses)
        deviation = NORMAL * median(abs(loss - middle) for loss in losses)
        return middle, middle + max(DEVIATIONS * deviation, LEAST_RISE * abs(middle))
