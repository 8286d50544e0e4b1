"""Compute the progress of a job between two events: its work, its saves and their stalls.

Training and saves alternate: `interval_s` of work, then a stall. Work is counted in seconds of
training at full speed. A state is identified by the work that the state includes.
"""

import math
from dataclasses import dataclass

from holdfast.simulate.pretrain.causes import LostMemory
from holdfast.simulate.pretrain.scenario import Saves, Tier


@dataclass(frozen=True, slots=True)
class Advance:
    """The use of a time span, in seconds; `work_s` is the training at full speed."""

    trained_s: float
    stalled_s: float
    work_s: float


@dataclass(slots=True)
class _Batch:
    """`count` saves, every `period_s` from the time `first_s` on; the first has the state `work_s`."""

    first_s: float
    period_s: float
    work_s: float
    number: int
    count: int


class Progress:
    """Track the work and the saves of a job."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self.work_s = 0.0
        self.speed = 1.0
        self._since_save_s = 0.0
        self._stall_left_s = 0.0
        self._number = 0
        self._batches: list[_Batch] = []
        self._kept: dict[str, float] = {tier.name: 0.0 for tier in saves.tiers}
        self._done: list[tuple[float, float]] = []  # pairs: work, and the seconds it took

    @property
    def saves_begun(self) -> int:
        """The number of saves that have begun."""
        return self._number

    def seconds_to(self, work_s: float) -> float:
        """Return the seconds until the job has done `work_s` of work, including stalls."""
        left_s = max(work_s - self.work_s, 0.0)
        first_s = self._saves.interval_s - self._since_save_s
        if left_s <= first_s:
            return self._stall_left_s + left_s / self.speed
        stalls = math.ceil((left_s - first_s) / self._saves.interval_s - 1e-12)
        return self._stall_left_s + left_s / self.speed + stalls * self._saves.stall_s

    def advance(self, now_s: float, span_s: float) -> Advance:
        """Train for `span_s` seconds from the time `now_s` on."""
        saves = self._saves
        left_s = span_s
        stalled_s = min(left_s, self._stall_left_s)
        self._stall_left_s -= stalled_s
        left_s -= stalled_s
        first_s = (saves.interval_s - self._since_save_s) / self.speed
        if left_s < first_s:
            work_s = left_s * self.speed
            self._since_save_s += work_s
            return self._did(left_s, stalled_s, work_s)
        at_s = now_s + stalled_s + first_s
        work_s = saves.interval_s - self._since_save_s
        left_s -= first_s
        period_s = saves.stall_s + saves.interval_s / self.speed
        more = int(left_s // period_s)
        self._batches.append(_Batch(at_s, period_s, self.work_s + work_s, self._number, more + 1))
        self._number += more + 1
        left_s = max(left_s - more * period_s, 0.0)
        work_s += more * saves.interval_s
        last_stall_s = min(left_s, saves.stall_s)
        self._stall_left_s = saves.stall_s - last_stall_s
        rest_s = left_s - last_stall_s
        self._since_save_s = rest_s * self.speed
        stalled_s += more * saves.stall_s + last_stall_s
        return self._did(span_s - stalled_s, stalled_s, work_s + rest_s * self.speed)

    def _did(self, trained_s: float, stalled_s: float, work_s: float) -> Advance:
        self.work_s += work_s
        if work_s > 0:
            self._done.append((work_s, trained_s))
        return Advance(trained_s, stalled_s, work_s)

    def settle(self, now_s: float, loses: LostMemory) -> None:
        """Decide which saves of each tier outlast a failure at `now_s`.

        `loses` is the memory that the failure loses. In a tier with `finishes`, a save is complete
        as soon as its stall is over, unless a node is lost.
        """
        for tier in self._saves.tiers:
            lag_s = 0.0 if tier.finishes and loses != "node" else tier.lag_s
            newest_s = self._newest(tier, now_s - lag_s)
            if loses not in tier.outlives:
                self._kept[tier.name] = -math.inf
            elif newest_s is not None:
                self._kept[tier.name] = newest_s
        self._batches.clear()

    def _newest(self, tier: Tier, stalled_until_s: float) -> float | None:
        """Return the state of the tier's newest save whose stall ended by `stalled_until_s`.

        None if there is no such save.
        """
        for batch in reversed(self._batches):
            ready_s = stalled_until_s - self._saves.stall_s - batch.first_s
            if ready_s < 0:
                continue
            index = min(int(ready_s // batch.period_s), batch.count - 1)
            # Saves are counted from 0: save n goes to a tier if n + 1 is divisible by the tier's
            # `every`.
            index -= (batch.number + index + 1) % tier.every
            if index >= 0:
                return batch.work_s + index * self._saves.interval_s
        return None

    def best(self, *, before_s: float = math.inf, older: int = 0) -> tuple[float, Tier]:
        """Return the newest state that can be restored, and the tier that has it.

        Args:
            before_s: the result has at most this much work. It need not be the newest save, since
                every tier keeps all older saves.
            older: the number of newest saves to skip because they are damaged.
        """
        found: tuple[float, float, Tier] | None = None
        for tier in self._saves.tiers:
            state_s = self._kept[tier.name]
            apart_s = self._saves.interval_s * tier.every
            if state_s > before_s:
                state_s -= math.ceil((state_s - before_s) / apart_s) * apart_s
                state_s = max(state_s, 0.0)
            if state_s == -math.inf:
                continue
            state_s = max(state_s - older * apart_s, 0.0)
            key = (state_s, -tier.restore_s, tier)
            if found is None or key[:2] > found[:2]:
                found = key
        assert found is not None
        return found[0], found[2]

    def go_back(self, work_s: float) -> float:
        """Go back to the state `work_s`; return the seconds of training that are lost."""
        lost_s, left_s = 0.0, self.work_s - work_s
        while left_s > 0 and self._done:
            work, seconds = self._done.pop()
            if work > left_s:
                part_s = seconds * (left_s / work)
                self._done.append((work - left_s, seconds - part_s))
                lost_s += part_s
                break
            left_s -= work
            lost_s += seconds
        self.work_s = work_s
        self._begin_attempt()
        for name, kept_s in self._kept.items():
            if kept_s > work_s:
                self._kept[name] = work_s
        return lost_s

    def stay(self) -> None:
        """Start the next attempt from the present state, which has just been saved."""
        for name in self._kept:
            self._kept[name] = self.work_s
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._batches.clear()
        self._since_save_s = self._stall_left_s = 0.0
        self.speed = 1.0
