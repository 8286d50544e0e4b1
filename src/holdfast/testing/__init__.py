"""Provide public fakes and faults, for the tests of this project and of its users.

Of the other packages, only `demo` uses this one. `Injector` breaks a supervised run by a seeded
schedule, and logs which fault it injected when. `RankFaults` lets faults happen inside a training
script.

These classes and functions are imported from their modules:

- `hosts.Hosts`: hosts that are network namespaces of this machine; needs root;
- `bad_nodes.BreakingLink`: a node whose connections break;
- `slurm.PrivateSlurm`: a real Slurm that is private to one test;
- `s3.serve`: an S3 server whose buckets fail according to their names; needs `moto[s3]`.
"""

from typing import TYPE_CHECKING, Any

from holdfast.testing.clock import FakeClock
from holdfast.testing.rank_faults import RankFaults

if TYPE_CHECKING:
    from holdfast.testing.injector import Injector, read_log, schedule

__all__ = ["FakeClock", "Injector", "RankFaults", "read_log", "schedule"]


def __getattr__(name: str) -> Any:
    # Lazy: a rank needs neither psutil nor the checkpoints of an injector.
    from importlib import import_module

    if name not in ("Injector", "read_log", "schedule"):
        raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
    return getattr(import_module("holdfast.testing.injector"), name)
