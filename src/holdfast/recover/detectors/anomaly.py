"""Find a loss that is not a finite number, or that stays far above its usual values.

A single step proves nothing: a script may itself skip a step whose loss is NaN, and single outliers
are noise. So an anomaly needs such losses in `NOT_FINITE_STEPS` or `SPIKE_STEPS` consecutive steps.
A rank that has never reported a finite loss is ignored as long as another rank has, because a
pipeline stage without a loss may report NaN. If no rank ever has, a state or a setting is broken
from the start. This counts as an anomaly after `NEVER_FINITE_STEPS` steps of a rank, once each rank
that reports losses has shown `NOT_FINITE_STEPS` of them, since the report of a finite loss may be
late.

A loss is compared with the median and the median absolute deviation of the last `WINDOW` ordinary
steps (robust statistics: Rousseeuw and Croux, JASA 88, 1993), and never only with the previous
loss. A spike must also be higher than each loss of these steps.

If the loss falls steadily, this deviation would be too wide. So a falling loss is compared with the
median of the last `LEVEL` steps, and with the distances that ordinary losses had from this median
at their time. A spike must be farther from the median than each of these distances, and higher than
the last `MIN_STEPS` losses. Before `MIN_STEPS` steps are known, as in the warm-up, only losses
that are not finite count.

An exploding loss may be finite for some steps before it is infinite or NaN. These steps belong to
the anomaly, too, so that the anomaly begins where the loss left its usual values.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Any, Literal, Self

WINDOW = 256
MIN_STEPS = 64
LEVEL = 32
FALL = 0.02
"""A loss falls steadily if the median of each quarter of the steps is lower by this share than the
median of the previous quarter."""
NOT_FINITE_STEPS = 2
NEVER_FINITE_STEPS = 10
SPIKE_STEPS = 3
RISE_STEPS = 5
"""The largest number of finite steps that count as an explosion before a loss that is not finite,
if the usual level of the loss is not known yet.
"""
RISE = 2.0
"""The losses of such an explosion exceed each earlier loss by this factor."""
DEVIATIONS = 8.0
"""A spike is at least this number of standard deviations above the median. The number is high,
since losses have heavy tails.
"""
MIN_RISE = 0.25
"""A spike exceeds the median at least by this share of the median, since a change of the data may
raise the loss a little for a long time."""
NORMAL = 1.4826
"""For normally distributed values, the standard deviation divided by the median absolute deviation.
"""


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """An anomaly of the loss, which shows that the state of the training is broken."""

    kind: Literal["not finite", "spike"]
    first_step: int
    """The first of the consecutive steps that show the anomaly, including finite steps of an
    exploding loss."""
    step: int
    """The step at which the anomaly became certain."""
    value: float
    """The loss of the step `step`."""
    usual: float | None = None
    """The median of the last ordinary losses; None if there are too few."""
    limit: float | None = None
    """The lowest loss that would have been a spike; None if there are too few losses."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led to the anomaly; None if the rank reports no
    batches."""
    rank: int | None = None
    """The only rank whose loss was not finite at first. It is None if there were several such
    ranks, or if only one rank reports losses.
    """

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
    """Find anomalies in the losses of one run, across all its attempts."""

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
        self._never_finite: dict[int, list[int]] = {}
        """For each rank that has reported losses, but never a finite one, its first steps."""
        self._broken_since: dict[int, int] = {}
        """For each rank whose last loss was not finite, the first step of these."""
        self._learns_anew = False

    def restarted(self, start_step: int) -> None:
        """Forget all steps after `start_step`, since the job repeats them."""
        kept = [one for one in self._ordinary if one[0] <= start_step]
        self._ordinary = deque(kept, maxlen=WINDOW)
        self._last_step = dict.fromkeys(self._last_step, start_step)
        self._last_finite = dict.fromkeys(self._last_finite, start_step)
        self._broken_since.clear()
        self._forget_signs()

    def accept(self) -> None:
        """Learn the usual losses anew, because the job continues at the present level."""
        self._ordinary.clear()
        self._learns_anew = True
        self._forget_signs()

    @property
    def is_calm(self) -> bool:
        """Return True if there is no sign of an anomaly, and the detector could have seen one."""
        has_finite = bool(self._last_finite)
        return has_finite and not (self._high or self._not_finite or self._learns_anew)

    @property
    def not_finite_since(self) -> int | None:
        """Return the step since which a loss is not finite; None if all losses are finite."""
        found = self._broken_since
        if self._last_finite:  # a stage without a loss may report NaN
            found = {rank: step for rank, step in found.items() if rank in self._last_finite}
        return min(found.values(), default=None)

    def look(
        self,
        rank: int,
        step: int,
        loss: float | None,
        *,
        leads: bool,
        ranks: Callable[[], Collection[int]] | None = None,
    ) -> Anomaly | None:
        """Record the loss of a rank's step; return the anomaly if it becomes certain, else None.

        Args:
            rank: the reporting rank.
            step: the number of steps completed. A second report of the same step is ignored. A step
                below the last one means that the script has started to count again.
            loss: the loss; None if the rank reports no loss.
            leads: True to search for spikes in the losses of this rank. This is done for only one
                rank, since the losses of ranks differ.
            ranks: a function that returns the ranks whose losses are expected; None: only this
                rank's. It is called seldom, since there may be thousands of ranks.
        """
        if loss is None:
            return None
        is_finite = math.isfinite(loss)
        if is_finite:
            self._broken_since.pop(rank, None)
        last = self._last_step.get(rank)
        if last is None and not is_finite:
            self._broken_since.setdefault(rank, step)
            return self._look_at_never_finite(rank, step, loss, ranks or (lambda: {rank}))
        if last is not None and step <= last:
            if step == last:
                return None
            self.restarted(step - 1)
        self._last_step[rank] = step
        if not is_finite:
            self._broken_since.setdefault(rank, step)
            return self._look_at_not_finite(rank, step, loss)
        self._not_finite.pop(rank, None)
        self._never_finite.clear()
        self._last_finite[rank] = step
        return self._look_at_level(step, loss) if leads else None

    def _look_at_never_finite(
        self, rank: int, step: int, loss: float, ranks: Callable[[], Collection[int]]
    ) -> Anomaly | None:
        if self._last_finite:
            return None
        steps = self._never_finite.setdefault(rank, [])
        if step not in steps and len(steps) < NEVER_FINITE_STEPS:
            steps.append(step)
        if len(steps) < NEVER_FINITE_STEPS:
            return None
        shown = {
            other for other, them in self._never_finite.items() if len(them) >= NOT_FINITE_STEPS
        }
        if not shown.issuperset(ranks()):
            return None
        self._forget_signs()
        return Anomaly(kind="not finite", first_step=steps[0], step=step, value=loss)

    def _look_at_not_finite(self, rank: int, step: int, loss: float) -> Anomaly | None:
        steps = self._not_finite.setdefault(rank, [])
        steps.append(step)
        if len(steps) < NOT_FINITE_STEPS:
            return None
        usual, _ = self._usual()
        first_step = self._rises_from(steps[0])
        others = [last for other, last in self._last_finite.items() if other != rank]
        # The gradients of all ranks are summed, so one step later no rank has a finite loss.
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
        """Return the step at which the leading rank's loss began to rise before `step`, or `step`."""
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
        self._never_finite = {}

    def _last(self, count: int) -> list[float]:
        """Return up to `count` of the last ordinary losses."""
        first = max(0, len(self._ordinary) - count)
        return [loss for _, loss, _ in islice(self._ordinary, first, None)]

    def _usual(self) -> tuple[float | None, float | None]:
        """Return the level of ordinary losses and the lowest loss of a spike; None if unknown yet."""
        if len(self._ordinary) < MIN_STEPS:
            return None, None
        losses = self._last(WINDOW)
        level = median(losses[-LEVEL:])
        if not _falls(losses):
            return level, _limit(median(losses), losses, highest=max(losses))
        distances = [distance for _, _, distance in self._ordinary]
        highest = max(level + max(distances), *losses[-MIN_STEPS:])
        return level, _limit(level, distances, highest=highest)


def _falls(losses: Sequence[float]) -> bool:
    part = len(losses) // 4
    levels = [median(losses[number * part : (number + 1) * part]) for number in range(4)]
    return all(now < before - FALL * abs(before) for before, now in pairwise(levels))


def _limit(level: float, values: Sequence[float], *, highest: float) -> float | None:
    """Return the lowest loss that is above the noise around `level`; None if the noise is unknown.

    The noise is computed from the spread of `values`. It is unknown if most values are equal, for
    example if all are 0.
    """
    middle = median(values)
    deviation = NORMAL * median(abs(value - middle) for value in values)
    rise = max(DEVIATIONS * deviation, MIN_RISE * abs(level))
    return None if deviation == 0 else max(level + rise, highest)
