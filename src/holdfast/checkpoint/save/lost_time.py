"""How much training time a save costs: what it is seen to cost in its call and at the fence, and the slow-down beside.

The slow-down is an estimate from outside: steps that pass while a save is being written, against the median of recent
steps that pass while none is. It needs one call of `save` a step, whether it saves or not, and some steps without.
"""

import statistics
from collections import deque
from typing import Final

_RECENT: Final = 31
_ENOUGH: Final = 3
_STRANGE: Final = 2.0
"""A step that is longer than usual by more than so many usual ones has something else in it, such as an evaluation."""


class LostTime:
    """Told of every call of `save`, in seconds of one clock."""

    def __init__(self) -> None:
        self._usual_s: deque[float] = deque(maxlen=_RECENT)
        self._since_s: float | None = None
        self._fence_s = 0.0
        self._in_flight = 0
        self.slowdown_s = 0.0
        """Of all saves so far; saves that were written at the same time share it."""

    @property
    def can_tell(self) -> bool:
        """Whether enough steps without a save were seen."""
        return len(self._usual_s) >= _ENOUGH

    def step(self, now_s: float, *, fence_s: float) -> None:
        """A call of `save` begins, so a step has ended.

        Args:
            now_s: when.
            fence_s: what updates have waited for copies so far, in all.
        """
        if self._since_s is None:
            return
        worked_s = now_s - self._since_s - (fence_s - self._fence_s)
        if not self._in_flight:
            self._usual_s.append(worked_s)
        elif self.can_tell:
            usual_s = statistics.median(self._usual_s)
            if worked_s <= (1 + _STRANGE) * usual_s:
                self.slowdown_s += (worked_s - usual_s) / self._in_flight

    def resume(self, now_s: float, *, fence_s: float, in_flight: int) -> None:
        """The call returns, so the next step begins, while so many saves are not durable yet."""
        self._since_s, self._fence_s, self._in_flight = now_s, fence_s, in_flight
