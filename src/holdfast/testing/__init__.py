"""Public fakes, for this project's tests and for those of its users. No room uses them."""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
