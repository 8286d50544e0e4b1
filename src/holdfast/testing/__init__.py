"""Public fakes, for this project's tests and for those of its users. No room uses them.

Imported from their modules: `slurm.PrivateSlurm`, a real Slurm that is private to one test; `s3.serve`, an S3 server
whose buckets fail as their names say (it needs `moto[s3]`); `hosts.Hosts`, hosts that are network namespaces of this
machine (they need root); `bad_nodes.BreakingLink`, a node whose connections break.
"""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
