"""Compare the times of two events to decide if one can have caused the other.

If a time is unknown, or if two clocks cannot be compared, the cost is 0.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.logs.times import waited_s

_SLACK_S: Final = 60.0
"""The largest time by which a cause may appear later than its effect, since output is buffered and
the clocks of nodes differ."""
_AFTER_ITS_EFFECT: Final = 4.0
NOT_WHEN_THE_WAIT_BEGAN: Final = 1.5
"""The cost of a cause that did not happen at the start of a timed-out wait, if another cause did.
"""
_LATE_SHARE: Final = 0.1
"""A wait may start before its cause by this share of the wait, since ranks enter a collective and
then a peer dies."""
_EARLY_S: Final = 300.0
_SOON_S: Final = 900.0
_LONG_AFTER_ITS_CAUSE: Final = 1.5
"""The cost of an effect that comes more than `_SOON_S` after its cause without having waited."""
_SAME_END_S: Final = 900.0
_INCOMPARABLE_S: Final = 30 * 86_400.0
"""If two times are further apart than this, the year or the day of one of them is wrong."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time span in which equal events were printed."""

    first_s: float
    """The earliest time of the events. It is a lower bound: the first event was not printed before.
    """
    printed_s: float | None
    """The earliest time that the line of an event itself states; None if no line states a time."""
    last_s: float
    clock: int
    """The number of the clock. Only spans of the same clock can be compared."""
    waited_s: float | None = None
    """For a timeout, the seconds of waiting before the line was printed."""


def follows_cost(cause: Span | None, effect: Span | None) -> float:
    """Return the surcharge, in nats, that the times put on the edge from `cause` to `effect`."""
    if cause is None or effect is None or effect.printed_s is None or cause.clock != effect.clock:
        return 0.0
    late_s = cause.first_s - effect.printed_s
    if abs(late_s) > _INCOMPARABLE_S:
        return 0.0
    if late_s > _SLACK_S:
        return _AFTER_ITS_EFFECT
    at_once = effect.waited_s is None and cause.printed_s is not None
    return _LONG_AFTER_ITS_CAUSE if at_once and effect.printed_s - cause.last_s > _SOON_S else 0.0


def began_wait(cause: Span | None, effect: Span | None) -> bool | None:
    """Return True if `cause` happened when the wait of `effect` started; None if incomparable."""
    if cause is None or effect is None or effect.printed_s is None or cause.clock != effect.clock:
        return None
    if effect.waited_s is None or cause.waited_s is not None:
        return None
    after_began_s = cause.first_s - effect.printed_s + effect.waited_s
    if abs(after_began_s) > _INCOMPARABLE_S:
        return None
    return -_EARLY_S < after_began_s < max(_SLACK_S, _LATE_SHARE * effect.waited_s)


def clocks_of(events: Iterable[Event]) -> dict[int, int]:
    """Return the clock number of each log, by `id(log)`.

    Logs that end at about the same time are assumed to have the same clock.
    """
    ends_s = {id(one.log): one.log.clock.last_s for one in events}
    clocks: dict[int, int] = {}
    clock, before_s = -1, -math.inf
    for end_s, log in sorted((end_s, log) for log, end_s in ends_s.items() if end_s is not None):
        clock += end_s - before_s > _SAME_END_S
        clocks[log], before_s = clock, end_s
    return clocks


def span_of(events: Iterable[Event], clocks: Mapping[int, int]) -> Span | None:
    """Return the time span of `events` on their most frequent clock; None if no time is known."""
    timed = [(one.time_s, one) for one in events if one.time_s is not None]
    if not timed:
        return None
    clock, _ = Counter(clocks[id(one.log)] for _, one in timed).most_common(1)[0]
    mine = [(time_s, one) for time_s, one in timed if clocks[id(one.log)] == clock]
    times_s = [time_s for time_s, _ in mine]
    waits_s = [
        waits
        for _, one in mine
        if one.rule.kind == "collective_timeout" and (waits := waited_s(one.text))
    ]
    return Span(
        first_s=min(times_s),
        printed_s=min((time_s for time_s, one in mine if one.has_own_time), default=None),
        last_s=max(times_s),
        clock=clock,
        waited_s=max(waits_s, default=None),
    )
