"""Draw random numbers that depend only on (seed, stream, number), and on no earlier draw.

So failure 17 has the same exposure, cause and node with one more spare, another interval or a
faster restart: two variants of a scenario meet the same failures (common random numbers).
"""

import math
from random import Random


def draws(seed: int, stream: str, number: int) -> Random:
    """Return the generator of one entity of a stream; equal keys give equal numbers anywhere."""
    return Random(f"{seed}/{stream}/{number}")


def exponential(uniform: float, mean: float) -> float:
    """Return the quantile of an exponential distribution at `uniform`, 0 <= uniform < 1."""
    return -math.log1p(-uniform) * mean


class Stream:
    """A Poisson process in exposure.

    Event k strikes once the hazard since event k - 1 reaches its draw. The hazard is the integral
    of the rate, and grows only while the job has processes.
    """

    __slots__ = ("_name", "_seed", "draw", "number", "remaining")

    def __init__(self, seed: int, name: str) -> None:
        self._seed, self._name, self.number = seed, name, -1
        self.next_event()

    def next_event(self) -> None:
        """Go on to the next event."""
        self.number += 1
        self.draw = draws(self._seed, self._name, self.number)
        self.remaining = exponential(self.draw.random(), 1.0)
        """The hazard until the event."""
