"""Provide a clock whose time passes only when a test calls it."""


class FakeClock:
    """A `holdfast.core.clock.Clock` that a test moves by hand."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self._epoch_s = now_s
        self._elapsed_s = 0.0

    def now_s(self) -> float:
        """Return the wall-clock time in Unix seconds: the start plus all jumps and advances."""
        return self._epoch_s + self._elapsed_s

    def monotonic_s(self) -> float:
        """Return the sum of all advances, in seconds."""
        return self._elapsed_s

    def jump(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, which may be negative, but not the monotonic clock."""
        self._epoch_s += seconds

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        assert seconds >= 0, "time does not go back"
        self._elapsed_s += seconds
