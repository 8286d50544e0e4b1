"""Find a loss that is not a finite number, or that stays far above its usual values.

One step alone proves nothing: a script may itself leave out a step whose loss is NaN, and single
outliers are noise. So an anomaly needs such losses at `NOT_FINITE_STEPS` or `SPIKE_STEPS` steps in
a row. A rank that has never reported a finite loss is ignored, because a pipeline stage without a
loss may report NaN.

A loss is compared with the median and the median absolute deviation of the last `WINDOW` ordinary
steps (robust statistics: Rousseeuw and Croux, JASA 88, 1993), never with the loss before. A spike
must also be higher than each loss of these steps.

A steadily falling loss widens that deviation. So a falling loss is compared with the median of the
last `LEVEL` steps, and with the distances of ordinary losses from this median at their time. A
spike must be farther than each of these distances, and higher than the last `LEAST_STEPS` losses.
Until so many steps are known, as in the warm-up, only losses that are not finite count.

A loss that explodes may be finite for some steps before it is infinite or NaN. Such steps belong to
the anomaly, so that the anomaly begins where the loss left its usual values.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Any, Literal, Self

WINDOW = 256
LEAST_STEPS = 64
LEVEL = 32
FALL = 0.02
"""A loss falls all the time if the median of each quarter of the steps is lower than the last one
by this share."""
NOT_FINITE_STEPS = 2
SPIKE_STEPS = 3
RISE_STEPS = 5
"""The most finite steps of a rise before a loss that is not finite, if no level is known yet."""
RISE = 2.0
"""The factor by which the losses of such a rise exceed each loss before them."""
DEVIATIONS = 8.0
"""The standard deviations of a spike above the median; losses have heavy tails."""
LEAST_RISE = 0.25
"""The least share of the median by which a spike exceeds the median: other data may raise a loss a
little for long."""
NORMAL = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A loss that shows a broken state of the training."""

    kind: Literal["not finite", "spike"]
    first_step: int
    """The first of the steps in a row that show the anomaly, including finite steps of an exploding
    loss."""
    step: int
    """The step at which the anomaly was certain."""
    value: float
    """The loss of that step."""
    usual: float | None = None
    """The median of the last ordinary losses; None if too few are known."""
    limit: float | None = None
    """The lowest loss that would have been a spike; None if too few losses are known."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led to the anomaly; None if the rank reports
    none."""
    rank: int | None = None
    """The only rank with a loss that was not finite at first; None if several or one rank reports."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; JSON has no NaN and no infinity."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**asdict(self), "value": value}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written.

        Raises:
            KeyError, TypeError, ValueError: the data is malformed.
        """
        led = data.get("batches")
        led = None if led is None else (int(led[0]), int(led[1]))
        return cls(**{**data, "value": float(data["value"]), "batches": led})


class AnomalyDetector:
    """A detector that receives the losses of one run, also across its attempts."""

    def __init__(self) -> None:
        self._ordinary: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """Steps, their losses, and the distance of each from the level before it."""
        self._high: list[int] = []
        """Steps in a row whose loss was not ordinary."""
        self._not_finite: dict[int, list[int]] = {}
        """For each rank, its last steps in a row whose loss was not finite."""
        self._last_step: dict[int, int] = {}
        """For each rank that has reported a finite loss, its last step."""
        self._last_finite: dict[int, int] = {}
        """For each rank, the last step with a finite loss."""
        self._learns_anew = False

    def restarted(self, start_step: int) -> None:
        """Forget all steps after `start_step`, since the job makes them again."""
        kept = [one for one in self._ordinary if one[0] <= start_step]
        self._ordinary = deque(kept, maxlen=WINDOW)
        self._last_step = dict.fromkeys(self._last_step, start_step)
        self._last_finite = dict.fromkeys(self._last_finite, start_step)
        self._forget_signs()

    def accept(self) -> None:
        """Begin to learn the usual losses anew, because the job goes on at the present level."""
        self._ordinary.clear()
        self._learns_anew = True
        self._forget_signs()

    @property
    def is_calm(self) -> bool:
        """Return True if there is no sign of an anomaly, and a sign would have been seen."""
        return not (self._high or self._not_finite or self._learns_anew)

    def look(self, rank: int, step: int, loss: float | None, *, leads: bool) -> Anomaly | None:
        """Record the loss of a rank's step; return the anomaly that is certain with this step.

        Args:
            rank: the reporting rank.
            step: steps completed. A second report of a step is ignored. A step below the last one
                shows that the script has started to count again.
            loss: the loss; None if the rank reports no loss.
            leads: True to look for spikes in the losses of this rank. Only one rank leads, since
                the losses of different ranks differ.
        """
        if loss is None:
            return None
        is_finite = math.isfinite(loss)
        last = self._last_step.get(rank)
        if last is None and not is_finite:
            return None
        if last is not None and step <= last:
            if step == last:
                return None
            self.restarted(step - 1)
        self._last_step[rank] = step
        if not is_finite:
            return self._look_at_not_finite(rank, step, loss)
        self._not_finite.pop(rank, None)
        self._last_finite[rank] = step
        return self._look_at_level(step, loss) if leads else None

    def _look_at_not_finite(self, rank: int, step: int, loss: float) -> Anomaly | None:
        steps = self._not_finite.setdefault(rank, [])
        steps.append(step)
        if len(steps) < NOT_FINITE_STEPS:
            return None
        usual, _ = self._usual()
        first_step = self._rises_from(steps[0])
        others = [last for other, last in self._last_finite.items() if other != rank]
        # The gradients of all ranks are summed, so one step later the losses of all ranks are not
        # finite.
        is_alone = first_step == steps[0] and bool(others) and min(others) >= first_step
        self._forget_signs()
        return Anomaly(
            kind="not finite",
            first_step=first_step,
            step=step,
            value=loss,
            usual=usual,
            rank=rank if is_alone else None,
        )

    def _rises_from(self, step: int) -> int:
        """Return the first of the leading rank's high steps up to `step`; `step` without one."""
        if self._high:
            return min(step, self._high[0])
        if self._usual()[1] is not None:
            return step
        losses = [abs(loss) for _, loss, _ in self._ordinary]
        for first in range(max(1, len(losses) - RISE_STEPS), len(losses)):
            if min(losses[first:]) > RISE * max(losses[:first]):
                return min(step, self._ordinary[first][0])
        return step

    def _look_at_level(self, step: int, loss: float) -> Anomaly | None:
        usual, limit = self._usual()
        if limit is None or loss <= limit:
            self._high.clear()
            level = median(self._last(LEVEL)) if self._ordinary else loss
            self._ordinary.append((step, loss, loss - level))
            self._learns_anew &= limit is None
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
        self._high = []
        self._not_finite = {}

    def _last(self, count: int) -> list[float]:
        """Return the last ordinary losses, at most `count`."""
        first = max(0, len(self._ordinary) - count)
        return [loss for _, loss, _ in islice(self._ordinary, first, None)]

    def _usual(self) -> tuple[float | None, float | None]:
        """Return the level of ordinary losses, and a spike's limit; None if too few are known."""
        if len(self._ordinary) < LEAST_STEPS:
            return None, None
        losses = self._last(WINDOW)
        level = median(losses[-LEVEL:])
        if not _falls(losses):
            return level, _limit(median(losses), losses, highest=max(losses))
        distances = [distance for _, _, distance in self._ordinary]
        highest = max(level + max(distances), *losses[-LEAST_STEPS:])
        return level, _limit(level, distances, highest=highest)


def _falls(losses: Sequence[float]) -> bool:
    part = len(losses) // 4
    levels = [median(losses[number * part : (number + 1) * part]) for number in range(4)]
    return all(now < before - FALL * abs(before) for before, now in pairwise(levels))


def _limit(level: float, values: Sequence[float], *, highest: float) -> float | None:
    """Return the lowest loss above the noise about a level; None if most values are equal.

    The spread of `values` gives the noise. If most losses are equal, as zeros are, nothing shows
    how far losses may be from each other.
    """
    middle = median(values)
    deviation = NORMAL * median(abs(value - middle) for value in values)
    rise = max(DEVIATIONS * deviation, LEAST_RISE * abs(level))
    return None if deviation == 0 else max(level + rise, highest)
