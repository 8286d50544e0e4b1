"""The part of time in an explanation: whether one event can have brought about another, by their clocks.

Where a time is absent, or two clocks cannot be compared, every cost is 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_SLACK_S: Final = 60.0
"""Output is kept back, and clocks of nodes differ: a cause may be printed so long after its effect."""
_AFTER_ITS_EFFECT: Final = 4.0
_NOT_WHEN_THE_WAIT_BEGAN: Final = 2.5
"""A wait that was over later began long before the alleged cause."""
_LONG_BEFORE_THE_WAIT: Final = 0.7
_LATE_SHARE: Final = 0.1
"""A wait may begin before its cause by so much of its length: the collective is entered, then a peer dies."""
_EARLY_S: Final = 900.0
_LONG_AGO_S: Final = 3600.0
"""After so long without a wait between, an event has seldom ended the job."""
_LONG_AGO: Final = 1.0
_SAME_END_S: Final = 900.0
_INCOMPARABLE_S: Final = 30 * 86_400.0
"""Two times further apart lack a year or a day."""


@dataclass(frozen=True, slots=True)
class Span:
    """When events that say the same were printed."""

    first_s: float
    """The first of them was not printed before."""
    printed_s: float | None
    """When the first one whose own line has a time was printed."""
    last_s: float
    clock: int
    """Spans of one number can be compared."""
    waited_s: float | None = None
    """Of a timeout: how long it waited before it was printed."""


def follows_cost(cause: Span | None, effect: Span | None) -> float:
    """What time adds, in nats, to the cost that `cause` brought about `effect`."""
    if cause is None or effect is None or effect.printed_s is None or cause.clock != effect.clock:
        return 0.0
    late_s = cause.first_s - effect.printed_s
    if abs(late_s) > _INCOMPARABLE_S:
        return 0.0
    cost = _AFTER_ITS_EFFECT if late_s > _SLACK_S else 0.0
    if effect.waited_s is not None and cause.waited_s is None:
        after_began_s = late_s + effect.waited_s
        if after_began_s > max(_SLACK_S, _LATE_SHARE * effect.waited_s):
            cost += _NOT_WHEN_THE_WAIT_BEGAN
        elif after_began_s < -_EARLY_S and cause.printed_s is not None:
            cost += _LONG_BEFORE_THE_WAIT
    return cost


def ends_cost(cause: Span | None, spans: Iterable[Span | None]) -> float:
    """What time adds, in nats, to the cost that `cause` by itself ended the job; `spans` are those of all events."""
    if cause is None or cause.printed_s is None:
        return 0.0
    last_s = max(
        one.last_s for one in (cause, *spans) if one is not None and one.clock == cause.clock
    )
    return _LONG_AGO if _LONG_AGO_S < last_s - cause.last_s < _INCOMPARABLE_S else 0.0


def clocks_of(ends_s: Mapping[int, float]) -> dict[int, int]:
    """The number of the clock of each log, given the last time in each; logs of one job that agree end together."""
    clocks: dict[int, int] = {}
    before_s = None
    for log, end_s in sorted(ends_s.items(), key=lambda item: item[1]):
        apart = before_s is None or end_s - before_s > _SAME_END_S
        clocks[log] = len(clocks) if apart else clocks[before]
        before, before_s = log, end_s
    return clocks
