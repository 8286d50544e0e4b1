"""A rank that is killed, and its successor, which restores from the node's memory."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpointing import raw
from checkpointing.child import child, in_child
from checkpointing.durable import TENSORS
from checkpointing.heard import Heard, read_so_far
from checkpointing.savers import Ours
from checkpointing.sizes import Sizes
from checkpointing.workloads import ManyTensors
from common.jobs import DoesNotWork
from common.machine import Quiet
from common.table import Must, Row

_held: list[Ours] = []


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """One death; the successor's imports and its model are not counted, opening the checkpoints is."""
    del rounds
    arguments: dict[str, Any] = {"folder": str(folder / "checkpoints"), "state_mib": sizes.state_mib}
    quiet.wait()
    with child(hold, folder / "case", **arguments) as killed:
        killed.answer()
        killed.kill()
        raw.drop_caches(folder / "checkpoints")
        found = in_child(succeed, folder / "case", **arguments)
    beyond_s = found["restore_s"] - found["copy_s"]
    yield Row(measure="restored in, beyond the copy", ours=beyond_s, limit=0, unit="s", must=Must("<=", 1))
    yield Row(measure="restored in (limit: a copy)", ours=found["restore_s"], limit=found["copy_s"], unit="s")
    yield Row(measure="read from disk ÷ the state", ours=found["read"], limit=0, unit="ratio", must=Must("<=", 0.01))


def hold(*, folder: str, state_mib: int) -> None:
    """Save, and wait for death."""
    workload = _workload(state_mib)
    saver = Ours(Path(folder), workload)
    saver.save(1)
    saver.wait()
    _held.append(saver)


def succeed(*, folder: str, state_mib: int) -> dict[str, Any]:
    """Restore, and say how long it took and what was read from disk, as a share of the state.

    Raises:
        DoesNotWork: something else was restored, or not from memory.
    """
    import holdfast
    from holdfast.checkpoint import checkpointer  # noqa: F401 - nor is the code, which imports more of torch

    heard, workload = Heard(), _workload(state_mib)
    saved = [tensor.clone() for tensor in workload.tensors]
    for tensor in workload.tensors:
        tensor.zero_()
    before_bytes, began_s = read_so_far()[0], time.perf_counter()
    ckpt = holdfast.Checkpointer(folder)
    ckpt.restore(workload.state)
    restore_s, read = time.perf_counter() - began_s, read_so_far()[0] - before_bytes
    heard.demand_tier("memory")
    if not all(map(torch.equal, workload.tensors, saved)):
        raise DoesNotWork("something else was restored")
    began_s = time.perf_counter()
    for tensor, source in zip(workload.tensors, saved, strict=True):
        tensor.copy_(source)
    copy_s = time.perf_counter() - began_s
    return {"restore_s": restore_s, "copy_s": copy_s, "read": read / sum(tensor.nbytes for tensor in saved)}


def _workload(state_mib: int) -> ManyTensors:
    return ManyTensors(count=TENSORS, tensor_bytes=state_mib * 1024**2 // TENSORS)
