"""Time that passes only when told to."""


class FakeClock:
    """A `holdfast.core.clock.Clock` that a test moves by hand."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self._epoch_s = now_s
        self._elapsed_s = 0.0

    def now_s(self) -> float:
        """Wall time: the start given plus what was advanced."""
        return self._epoch_s + self._elapsed_s

    def monotonic_s(self) -> float:
        """Seconds advanced so far."""
        return self._elapsed_s

    def jump(self, seconds: float) -> None:
        """Set the wall clock by `seconds`, which may be negative; the monotonic clock goes on."""
        self._epoch_s += seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0, "time does not go back"
        self._elapsed_s += seconds
