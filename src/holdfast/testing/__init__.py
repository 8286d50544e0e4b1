"""Public fakes, for this project's tests and for those of its users. No room uses them.

A real Slurm, private to one test, is `holdfast.testing.slurm.PrivateSlurm`; it is imported from there.
"""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
