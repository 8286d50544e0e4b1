"""Draw random numbers that depend only on (seed, stream, number), and on no earlier draw.

So two variants of a scenario meet the same failures (common random numbers). For example, failure
17 has the same exposure, cause and node if the job has one more spare, another interval between
saves or a faster restart.
"""

import math
from random import Random


def draws(seed: int, stream: str, number: int) -> Random:
    """Return the random generator for item `number` of a stream; equal for equal arguments."""
    return Random(f"{seed}/{stream}/{number}")


def exponential(uniform: float, mean: float) -> float:
    """Return the quantile of an exponential distribution at `uniform`, 0 <= uniform < 1."""
    return -math.log1p(-uniform) * mean


class Stream:
    """A Poisson process of events, such as failures of nodes.

    The hazard is the integral of the rate over the time in which the job has processes. Event k
    strikes when the hazard since event k - 1 reaches a number that was drawn for event k.
    """

    __slots__ = ("_name", "_seed", "draw", "number", "remaining")

    def __init__(self, seed: int, name: str) -> None:
        self._seed, self._name, self.number = seed, name, -1
        self.next_event()

    def next_event(self) -> None:
        """Draw the next event."""
        self.number += 1
        self.draw = draws(self._seed, self._name, self.number)
        self.remaining = exponential(self.draw.random(), 1.0)
        """The hazard that remains until the event."""
