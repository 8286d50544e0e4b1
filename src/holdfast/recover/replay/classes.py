"""Find the class of a broken loss from the reports of attempts, by pure functions.

The class is the kind of cause. To find it, the attempt after a broken loss is a replay: it trains
on the same data from a healthy checkpoint, if possible with each rank on another node or GPU. The
class follows from the result:

- The loss breaks again with the same numbers. The cause is the data or the model.
- The replay passes these steps without a broken loss. The cause is the hardware on which the loss
  broke.
- The loss broke in the first steps after a checkpoint file was restored, and a replay from an older
  file passes these steps. The cause is the checkpoint. Conversely, a file is good if an earlier
  attempt trained past its step with the same numbers.
- The replay begins with different losses. The training is not reproducible, and the cause is
  unknown. If a replay breaks again, only its first loss is compared, since this loss depends only
  on the weights and the data, and not on gradients.

Training is exactly reproducible if the first steps that two attempts have in common agree to the
last bit. Otherwise, numbers count as the same within a tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.recover.replay.traces import Numbers, Trace

AnomalyClass = Literal["data_or_model", "hardware", "checkpoint", "cannot_tell"]

LEADING: Final = 3
"""The number of first common steps of two attempts that are compared, to find out how reproducible
the training is.
"""
NOISE: Final = 0.01
"""If the first common losses differ by more than this share, the training is not reproducible."""
TOLERANCE: Final = 0.02
"""If the training is only roughly reproducible, two numbers count as different from this relative
difference on."""
ANOMALY_TOLERANCE: Final = 0.1
"""If the training is only roughly reproducible, a broken step counts as the same up to this
relative difference."""
SLACK_STEPS: Final = 3
"""If the training is only roughly reproducible, the loss may break this number of steps earlier or
later.
"""
DIRECT_STEPS: Final = 2
"""A damaged file leads to different numbers within this number of steps after its restore. One step
is not enough, since the optimizer's state affects only the second loss."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The class of a broken loss, or the replay that is needed to find the class."""

    kind: AnomalyClass | None = None
    """The class of the broken loss; None if a replay is needed first."""
    evidence: str = ""
    """The reason, as a sentence."""
    suspects: tuple[str, ...] = ()
    """The names of the nodes on which the loss broke, if the hardware is the cause."""
    before_step: int | None = None
    """The next replay must start from a checkpoint before this step, since the file of this step
    may be damaged."""

    @property
    def replays(self) -> bool:
        """True if the same steps must run again."""
        return self.kind is None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"class": self.kind, "evidence": self.evidence, "suspects": list(self.suspects)}


def of_failure(now: Trace, earlier: Sequence[Trace]) -> Finding:
    """Return the class of the broken loss that ended an attempt, or the replay that is needed.

    Args:
        now: the trace of the attempt, including its anomaly.
        earlier: the traces of the earlier attempts, in order.
    """
    assert now.anomaly is not None
    alike = [one for one in earlier if one.left_out == now.left_out]
    broken = [one for one in alike if one.anomaly is not None and _common(one, now)]
    if not broken:
        return _first_time(now, alike)
    before = broken[-1]
    noise = noise_of(before, now)
    again = f"step {now.anomaly.first_step} broke again in attempt {now.attempt}"
    if not comes_again(before, now):
        if noise is not None and noise > NOISE:
            return Finding(kind="cannot_tell", evidence=_not_repeatable(before, now, noise))
        return Finding(
            kind="hardware",
            evidence=f"The same steps gave other numbers in attempt {now.attempt} than in attempt {before.attempt}.",
            suspects=_suspects(before, now),
        )
    file = now.restored_step
    if file is None or before.restored_step != file or _is_good(file, now, alike):
        where = " on other nodes" if before.nodes and before.nodes != now.nodes else ""
        return Finding(
            kind="data_or_model",
            evidence=f"The loss of {again}{where}, with the same numbers.",
        )
    if _clean(now, alike) is not None:
        return Finding(kind="checkpoint", evidence=_bad_file(file), before_step=file)
    return Finding(before_step=file)


def of_passed(broken: Trace, now: Trace, earlier: Sequence[Trace]) -> Finding:
    """Return the class of a broken loss after another attempt has passed its steps.

    Args:
        broken: the trace of the attempt that the broken loss ended.
        now: the trace of the attempt that has passed the steps with ordinary losses.
        earlier: the traces of all attempts before `now`, in order.
    """
    assert broken.anomaly is not None
    file = broken.restored_step
    step = broken.anomaly.first_step
    if file is not None and now.start_step < file:
        live = [
            one
            for one in earlier
            if one.start_step < file and one.left_out == now.left_out and _ordinary(one, now)
        ]
        least = min((noise_of(one, now, steps=LEADING) or 0.0 for one in live), default=0.0)
        if least > NOISE:
            return Finding(kind="cannot_tell", evidence=_not_repeatable(broken, now, least))
        apart = first_apart(broken, now, exactly=any(repeats_exactly(one, now) for one in live))
        if apart is not None and apart <= file + DIRECT_STEPS:
            return Finding(kind="checkpoint", evidence=_bad_file(file))
    else:
        noise = noise_of(broken, now, steps=LEADING)
        if noise is not None and noise > NOISE:
            return Finding(kind="cannot_tell", evidence=_not_repeatable(broken, now, noise))
    return Finding(
        kind="hardware", evidence=_passed(step, broken, now), suspects=_suspects(broken, now)
    )


def comes_again(before: Trace, now: Trace) -> bool:
    """Return True if two attempts broke at the same step with the same numbers."""
    one, two = before.anomaly, now.anomaly
    assert one is not None
    assert two is not None
    steps = range(min(one.first_step, two.first_step), min(one.step, two.step) + 1)
    common = [step for step in steps if step in before.numbers and step in now.numbers]
    apart = [_difference(before.numbers[step], now.numbers[step]) for step in common]
    if repeats_exactly(before, now) and common:
        return max(apart) == 0.0
    # Only the first steps are compared, since later steps of an anomaly amplify every difference.
    is_alike = not common or apart[0] <= ANOMALY_TOLERANCE
    is_near = abs(one.first_step - two.first_step) <= SLACK_STEPS
    return one.kind == two.kind and is_near and is_alike


def noise_of(one: Trace, other: Trace, *, steps: int = 1) -> float | None:
    """Return the largest relative difference of the first ordinary losses of two attempts.

    Only steps that both attempts have are compared. After a restore, the first loss depends only on
    the weights and the data, even if the gradients are broken.

    Args:
        one: the trace of an attempt.
        other: the trace of another attempt.
        steps: the number of steps to compare.

    Returns:
        The difference; None if the attempts have no such step in common.
    """
    return max(
        (
            _difference(one.numbers[step][:1], other.numbers[step][:1])
            for step in _ordinary(one, other)[:steps]
        ),
        default=None,
    )


def repeats_exactly(one: Trace, other: Trace) -> bool:
    """Return True if the first common ordinary steps of two attempts agree to the last bit."""
    leading = _ordinary(one, other)[:LEADING]
    return bool(leading) and all(
        _difference(one.numbers[step], other.numbers[step]) == 0.0 for step in leading
    )


def first_apart(one: Trace, other: Trace, *, exactly: bool) -> int | None:
    """Return the first common step at which the numbers of two attempts differ, or None."""
    limit = 0.0 if exactly else TOLERANCE
    return next(
        (
            step
            for step in _common(one, other)
            if _difference(one.numbers[step], other.numbers[step]) > limit
        ),
        None,
    )


def _first_time(now: Trace, alike: Sequence[Trace]) -> Finding:
    """Return the finding about a loss that broke for the first time.

    Earlier attempts may have passed its steps.
    """
    clean = _clean(now, alike)
    if clean is None:
        return Finding()
    noise = noise_of(clean, now)
    file = now.restored_step
    if file is not None and clean.start_step < file:
        apart = first_apart(clean, now, exactly=repeats_exactly(clean, now))
        if apart is not None and apart <= file + DIRECT_STEPS:
            return Finding(before_step=file)
    if noise is None or noise > NOISE:
        return Finding()
    assert now.anomaly is not None
    return Finding(
        kind="hardware",
        evidence=_passed(now.anomaly.first_step, now, clean),
        suspects=_suspects(now, clean),
    )


def _clean(now: Trace, alike: Sequence[Trace]) -> Trace | None:
    """Return the last attempt that passed the steps at which the loss of `now` broke."""
    assert now.anomaly is not None
    first, last = now.anomaly.first_step, now.anomaly.step
    passed = (
        one
        for one in reversed(alike)
        if first in one.numbers
        and last in one.numbers
        and (one.anomaly is None or one.anomaly.first_step > last)
    )
    return next(passed, None)


def _is_good(file: int, now: Trace, alike: Sequence[Trace]) -> bool:
    """Return True if a checkpoint file is good.

    This is so if an earlier attempt trained past the step of the file, with the same numbers as the
    attempt that restored the file.
    """
    after = range(file + 1, file + DIRECT_STEPS + 1)
    return any(
        one.start_step < file
        and all(step in one.numbers and step in now.numbers for step in after)
        and all(_difference(one.numbers[step], now.numbers[step]) <= TOLERANCE for step in after)
        for one in alike
    )


def _ordinary(one: Trace, other: Trace) -> list[int]:
    """Return the steps that two attempts have in common before the loss of either breaks."""
    ends = [each.anomaly.first_step for each in (one, other) if each.anomaly is not None]
    return [step for step in _common(one, other) if not ends or step < min(ends)]


def _common(one: Trace, other: Trace) -> list[int]:
    return [step for step in one.numbers if step in other.numbers]


def _difference(one: Numbers, other: Numbers) -> float:
    """Return the largest relative difference of two steps' numbers.

    The difference of equal numbers is 0.0, and so is the difference of NaN and NaN.
    """
    largest = 0.0
    for left, right in zip(one, other, strict=False):
        if left == right or (math.isnan(left) and math.isnan(right)):
            continue
        if not (math.isfinite(left) and math.isfinite(right)):
            return math.inf
        largest = max(largest, abs(left - right) / max(abs(left), abs(right)))
    return largest


def _suspects(broken: Trace, now: Trace) -> tuple[str, ...]:
    """Return the nodes on which the loss broke."""
    names = dict.fromkeys(broken.nodes)
    if now.anomaly is not None:
        # If the loss broke twice, only nodes that took part both times are suspects.
        names = dict.fromkeys(one for one in names if one in now.nodes) or names
    return tuple(names)


def _passed(step: int, broken: Trace, clean: Trace) -> str:
    evidence = f"Attempt {clean.attempt} has passed step {step} with the same data and weights"
    if broken.nodes and clean.nodes and broken.nodes != clean.nodes:
        return f"{evidence}, with the ranks on other nodes."
    return f"{evidence}; on the same nodes, a lasting fault and a passing one look the same."


def _bad_file(file: int) -> str:
    return (
        f"The loss broke after the restore of the checkpoint of step {file} alone: a state that did not come from "
        "this file has passed the same steps."
    )


def _not_repeatable(before: Trace, now: Trace, noise: float) -> str:
    return (
        f"The training does not repeat itself: attempts {before.attempt} and {now.attempt} differ by {noise:.1%} in "
        "the first loss that they have in common. Seed all random numbers and restore them and the position in the "
        "data (run.batches) so that the cause can be found."
    )
