"""Whether a thread still comes back: so that a process whose engine hangs does not claim to be alive."""

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.clock import Clock


class Pulse:
    """Beaten by one thread, felt by another. `limit_s` is the longest between two beats of a thread that lives."""

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._until_s = clock.monotonic_s() + limit_s

    def beat(self) -> None:
        """The thread is here."""
        self._until_s = self._clock.monotonic_s() + self._limit_s

    @contextmanager
    def held(self, limit_s: float) -> Iterator[None]:
        """The thread will be away for up to `limit_s`, and says so: a load, a swap."""
        self._until_s = self._clock.monotonic_s() + limit_s
        try:
            yield
        finally:
            self.beat()

    def beats(self) -> bool:
        """Whether the thread was here lately, or is away no longer than it said."""
        return self._clock.monotonic_s() < self._until_s
