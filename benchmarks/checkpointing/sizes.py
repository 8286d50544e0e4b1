"""Define the amount of work of each part."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.child import FORKED
from checkpointing.savers import (
    ATTESTED,
    DCP_SHARED,
    OURS,
    SAVERS,
    SHORT,
    TORCH_CHECKPOINTING,
    WRITTEN,
)
from common.jobs import TORCHRUN

_LITTLE = (*SHORT, DCP_SHARED, TORCH_CHECKPOINTING)
"""The savers that lose so little that many pairs are needed."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The size of training with a save and without, in turn."""

    workload: str
    shape: dict[str, Any]
    amount: int
    """The amount of work at which calibration begins, if any."""
    forward_backward_s: float | None
    """The time of forward and backward to calibrate to."""
    steps: int = 10
    """The most steps between two saves: the next save comes once the last one is durable."""
    pairs: int
    """Pairs of blocks with a save and without, in each process."""
    short_pairs: int
    """Pairs for the savers of `_LITTLE`."""
    calls: int
    """Further steps with a save in each of Holdfast's processes, for the percentiles."""
    savers: tuple[str, ...]
    open_files: int | None = None
    launcher: tuple[str, ...] = (sys.executable,)
    """As in `Sizes`."""

    def calibration(self) -> dict[str, Any]:
        """The arguments of `training.calibrate`."""
        return {
            "workload": self.workload,
            "shape": self.shape,
            "amount": self.amount,
            "seconds": self.forward_backward_s,
        }

    def measurement(self, saver: str, folder: Path, amount: int) -> dict[str, Any]:
        """The arguments of `training.measure`, for the calibrated amount of work."""
        return {
            "folder": str(folder),
            "saver": saver,
            "workload": self.workload,
            "shape": self.shape,
            "amount": amount,
            "steps": self.steps,
            "pairs": self.short_pairs if saver in _LITTLE else self.pairs,
            "calls": self.calls if saver in (OURS, ATTESTED) else 0,
            "open_files": self.open_files,
        }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all parts."""

    lost: Training
    many: Training
    state_mib: int
    """The state of the parts on the disk and the node's memory."""
    durable_pairs: int
    ranks: tuple[int, int]
    """The number of ranks that save, and the number that restore."""
    shard_mib: int
    """The size of the whole state that those ranks share."""
    small_mib: int
    saves: int
    buffers_mib: int
    """The size of a module's buffers, which each save copies in its call."""
    buffer_pairs: int
    """Pairs of a save with such buffers and one without."""
    limits_bytes: int
    launcher: tuple[str, ...] = (sys.executable,)
    """The command that runs Python in each part's processes; a quick run forks instead."""
    gpu_bytes: float = 36e9
    """The largest state on a GPU."""

    def group(self, ranks: int) -> dict[str, Any]:
        """Return the options of `child` for a group of ranks: under torchrun, or forked."""
        if not self.launcher:
            return {"launcher": self.launcher, "ranks": ranks}
        return {"launcher": (*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}")}


FULL = Sizes(
    lost=Training(
        workload="llama",
        shape={"layers": 10, "width": 768, "inner": 2048, "vocabulary": 47_360},
        amount=64,
        forward_backward_s=1.25,
        pairs=4,
        short_pairs=40,
        calls=60,
        savers=tuple(SAVERS),
    ),
    many=Training(
        workload="many",
        shape={"count": 20_000, "tensor_bytes": 10_000},
        amount=10_000,
        forward_backward_s=1.25,
        pairs=4,
        short_pairs=40,
        calls=60,
        savers=tuple(name for name in SAVERS if name != WRITTEN),
        open_files=1024,
    ),
    state_mib=1640,
    durable_pairs=21,
    ranks=(8, 3),
    shard_mib=1024,
    small_mib=32,
    saves=1000,
    buffers_mib=128,
    buffer_pairs=21,
    limits_bytes=1024**3,
)
QUICK = Sizes(
    lost=Training(
        workload="llama",
        shape={"layers": 2, "width": 128, "inner": 256, "vocabulary": 1000},
        amount=32,
        forward_backward_s=None,
        pairs=1,
        short_pairs=2,
        calls=3,
        launcher=FORKED,
        savers=SHORT,
    ),
    many=Training(
        workload="many",
        shape={"count": 1000, "tensor_bytes": 10_000},
        amount=2000,
        forward_backward_s=None,
        pairs=1,
        short_pairs=2,
        calls=3,
        launcher=FORKED,
        savers=(OURS,),
        open_files=1024,
    ),
    state_mib=64,
    durable_pairs=3,
    ranks=(2, 1),
    shard_mib=48,
    small_mib=4,
    saves=20,
    buffers_mib=16,
    buffer_pairs=5,
    limits_bytes=64 * 1024**2,
    launcher=FORKED,
)
