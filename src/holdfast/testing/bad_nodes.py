"""Nodes that exist as names alone, of which some fail tests at random: for statistics of localisation."""

import random
from collections.abc import Mapping, Sequence


class EmulatedNodes:
    """A cluster whose faulty nodes fail each test that they take part in with a rate of their own.

    Attributes:
        names: of all nodes.
        rates: of each faulty node, its rate of failure in [0, 1].
    """

    def __init__(self, count: int, rates: Mapping[str, float], source: random.Random) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.rates = dict(rates)
        self._source = source

    @classmethod
    def drawn(cls, count: int, *, bad: int, rate: float, source: random.Random) -> "EmulatedNodes":
        """Return a cluster of `count` nodes, `bad` of which, drawn from `source`, fail with `rate`."""
        names = [f"n{number}" for number in range(1, count + 1)]
        return cls(count, dict.fromkeys(source.sample(names, bad), rate), source)

    def passes(self, world: Sequence[str]) -> bool:
        """Test some nodes together once; return whether the test passed."""
        return all(self._source.random() >= self.rates.get(name, 0.0) for name in world)
