"""Decide which checkpoints to keep, and why.

The functions apply a policy to a list of checkpoints. They read and delete nothing.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.checkpoint.catalog.catalog import CheckpointInfo
from holdfast.core.arguments import check_whole
from holdfast.core.errors import BadUse

_DOUBLE = "its step was saved again"


@dataclass(frozen=True, kw_only=True)
class Best:
    """Keep the `count` checkpoints with the lowest (`min`) or highest (`max`) value of a metric.

    Of two checkpoints with equal values, the newer one is preferred.
    """

    metric: str
    count: int
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "count", check_whole(f"count of {self.metric!r}", self.count, least=1)
        )
        if not self.metric:
            raise BadUse(
                "A metric has a name. Give one that an evaluation has noted, such as 'loss'."
            )
        if self.mode not in ("min", "max"):
            raise BadUse(f"mode of {self.metric!r} is {self.mode!r}; allowed are 'min' and 'max'.")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Select the checkpoints to keep by rules; without any rule, all checkpoints stay.

    Attributes:
        last: keep this number of newest checkpoints.
        every_steps: keep the checkpoints whose step is divisible by this number.
        within_s: keep the checkpoints written within this number of seconds before now.
        best: keep the checkpoints with the best values of a metric.

    The rules are applied to the checkpoints of the present line of training, and separately to
    those that training has abandoned.

    These checkpoints stay even if no rule selects them:

    - the newest
    - the newest one marked verified, and the newest one marked healthy
    - pinned checkpoints, and those with a hold
    - checkpoints with unreadable marks
    - damaged checkpoints, so that the damage can be examined

    Raises:
        BadUse: a value is not allowed.
    """

    last: int | None = None
    every_steps: int | None = None
    within_s: float | None = None
    best: tuple[Best, ...] = ()

    def __post_init__(self) -> None:
        for name in ("last", "every_steps"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name), least=1))
        if self.within_s is not None and not (self.within_s > 0 and math.isfinite(self.within_s)):
            raise BadUse(f"within_s is {self.within_s!r}; allowed is a number of seconds above 0.")

    @property
    def has_rules(self) -> bool:
        """Return True if there is a rule.

        Even without a rule, older saves of the same step are deleted.
        """
        return bool(self.best) or any(
            rule is not None for rule in (self.last, self.every_steps, self.within_s)
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Describe the decision about one checkpoint.

    Attributes:
        info: the checkpoint.
        is_whole: whether the checkpoint is complete, and no damage is known.
        stays: all reasons to keep the checkpoint; empty if it is to be deleted.
        goes: the reason to delete the checkpoint; None if it is kept.
    """

    info: CheckpointInfo
    is_whole: bool
    stays: tuple[str, ...] = ()
    goes: str | None = None


def judge(
    checkpoints: Sequence[CheckpointInfo],
    policy: Retention,
    *,
    now_s: float | None,
    damaged: Collection[Path] = (),
    committed: Path | None = None,
) -> list[Verdict]:
    """Decide for each checkpoint whether to keep it.

    Args:
        checkpoints: the result of `scan`, newest first.
        policy: the rules.
        now_s: the time, in seconds since the Unix epoch. With None, all holds are treated as not
            ended, and the rule `within_s` keeps all checkpoints.
        damaged: checkpoints that the caller has found damaged.
        committed: a checkpoint that was written just now, which always stays.

    Returns:
        A verdict for each checkpoint, in the same order.
    """
    whole = [info for info in checkpoints if _damage(info, damaged) is None]
    first_of_step: dict[int, CheckpointInfo] = {}
    for info in whole:
        first_of_step.setdefault(info.step, info)
    counted = list(first_of_step.values())
    on_line = [info for info in counted if not info.abandoned] or counted
    reasons: dict[Path, list[str]] = {info.path: [] for info in checkpoints}
    abandoned = [] if on_line is counted else [info for info in counted if info.abandoned]
    if policy.has_rules:
        found = [*_by_rules(on_line, policy, now_s)]
        found += ((info, f"abandoned, {why}") for info, why in _by_rules(abandoned, policy, now_s))
    else:
        found = [(info, "there is no rule") for info in counted]
    for info, why in (*found, *_always(whole, on_line, now_s, committed)):
        reasons[info.path].append(why)
    verdicts = []
    for info in checkpoints:
        damage = _damage(info, damaged)
        stays = tuple(reasons[info.path]) if damage is None else (f"evidence: {damage}",)
        is_double = first_of_step.get(info.step) is not info
        goes = None if stays else _DOUBLE if is_double else "no rule keeps it"
        verdicts.append(Verdict(info=info, is_whole=damage is None, stays=stays, goes=goes))
    return verdicts


def superfluous(
    checkpoints: Sequence[CheckpointInfo],
    *,
    committed: Path,
    damaged: Collection[Path],
    keep: int | Retention | None,
    now_s: float | None = None,
) -> list[CheckpointInfo]:
    """Return the checkpoints to delete now that the checkpoint `committed` is durable.

    A number `keep` is short for `Retention(last=keep)`. Older saves of a step that was saved again
    come first. See `judge` for the other arguments.
    """
    policy = keep if isinstance(keep, Retention) else Retention(last=keep)
    verdicts = judge(checkpoints, policy, now_s=now_s, damaged=damaged, committed=committed)
    going = sorted(
        (verdict for verdict in verdicts if not verdict.stays),
        key=lambda verdict: verdict.goes != _DOUBLE,
    )
    return [verdict.info for verdict in going]


def best_first(checkpoints: Sequence[CheckpointInfo], best: Best) -> list[CheckpointInfo]:
    """Return the checkpoints that have the metric, best first; of two equals, newer first."""
    sign = 1 if best.mode == "min" else -1
    values = {info.path: info.marks.metrics.get(best.metric, math.nan) for info in checkpoints}
    known = [info for info in checkpoints if not math.isnan(values[info.path])]
    return sorted(known, key=lambda info: (sign * values[info.path], -info.step))


def deletable_for_room(
    checkpoints: Sequence[CheckpointInfo],
    *,
    damaged: Collection[Path],
    keep: Retention,
    now_s: float | None,
) -> list[CheckpointInfo]:
    """Return the checkpoints that may be deleted if the disk is full, in the order of deletion.

    Older saves of a step that was saved again come first, then the oldest steps. `keep.last` is
    treated as 1, since a new checkpoint is more useful than spare older ones. All other reasons to
    keep a checkpoint apply, see `judge`.
    """
    policy = keep if keep.last is None else replace(keep, last=1)
    verdicts = judge(checkpoints, policy, now_s=now_s, damaged=damaged)
    going = [verdict for verdict in verdicts if not verdict.stays]
    going.sort(key=lambda verdict: (verdict.goes != _DOUBLE, verdict.info.step))
    return [verdict.info for verdict in going]


def _by_rules(
    counted: Sequence[CheckpointInfo], policy: Retention, now_s: float | None
) -> Iterator[tuple[CheckpointInfo, str]]:
    for info in counted[: policy.last or 0]:
        yield info, f"one of the last {policy.last}"
    for info in counted:
        if policy.every_steps is not None and info.step % policy.every_steps == 0:
            yield info, f"every {policy.every_steps} steps"
        if policy.within_s is not None and _is_within(info, policy.within_s, now_s):
            yield info, f"written within {policy.within_s:.0f} s"
    for best in policy.best:
        for place, info in enumerate(best_first(counted, best)[: best.count], start=1):
            yield (
                info,
                f"{best.metric} {info.marks.metrics[best.metric]:g} is number {place} ({best.mode})",
            )


def _always(
    whole: Sequence[CheckpointInfo],
    counted: Sequence[CheckpointInfo],
    now_s: float | None,
    committed: Path | None,
) -> Iterator[tuple[CheckpointInfo, str]]:
    for info in counted[:1]:
        yield info, "the newest"
    line = [info for info in whole if info.abandoned == counted[0].abandoned]
    for info in [info for info in line if info.marks.verified][:1]:
        yield info, "the newest verified one"
    for info in [info for info in line if info.marks.healthy][:1]:
        yield info, "the newest healthy one"
    for info in whole:
        if info.path == committed:
            yield info, "written just now"
        if info.marks.pinned is not None:
            yield info, "pinned" + (f": {info.marks.pinned.why}" if info.marks.pinned.why else "")
        for holder in info.marks.wanted_by(now_s):
            yield info, f"wanted by {holder}"
        if info.marks.unreadable is not None:
            yield info, f"its marks cannot be read: {info.marks.unreadable}"


def is_damaged(info: CheckpointInfo, damaged: Collection[Path]) -> bool:
    """Return True if a checkpoint is known to be damaged; `damaged` is the caller's own list."""
    return _damage(info, damaged) is not None


def _is_within(info: CheckpointInfo, within_s: float, now_s: float | None) -> bool:
    return now_s is None or info.created_at_s is None or info.created_at_s >= now_s - within_s


def _damage(info: CheckpointInfo, damaged: Collection[Path]) -> str | None:
    if info.state not in ("written", "verified"):
        return info.reason or info.state
    if info.marks.damaged is not None:
        return info.marks.damaged.why or "it was found damaged"
    return "it did not verify" if info.path in damaged else None
