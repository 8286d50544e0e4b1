"""Public fakes, for this project's tests and for those of its users. No room uses them.

Imported from their modules: `slurm.PrivateSlurm`, a real Slurm that is private to one test; `s3.serve`, an S3 server
whose buckets fail as their names say (it needs `moto[s3]`).
"""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
