"""Kill a rank or a node; restore from the node's memory, or from a peer's."""

import os
import signal
import sys
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
from common.jobs import TORCHRUN, DoesNotWork, wait_until
from common.machine import Quiet
from common.table import Must, Row

_held: list[Any] = []
NODES = 2
HELD_S = 600.0


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Measure the death of a rank and of a node.

    The successors' imports and models are left out; opening the checkpoints counts.
    """
    del rounds
    yield from _rank_rows(folder / "rank", quiet, sizes)
    yield from _node_rows(folder / "node", quiet, sizes)


def _rank_rows(folder: Path, quiet: Quiet, sizes: Sizes) -> Iterator[Row]:
    arguments: dict[str, Any] = {
        "folder": str(folder / "checkpoints"),
        "state_mib": sizes.state_mib,
    }
    quiet.wait()
    with child(hold, folder / "case", launcher=sizes.launcher, **arguments) as killed:
        killed.answer()
        killed.kill()
        raw.drop_caches(folder / "checkpoints")
        found = in_child(succeed, folder / "case", launcher=sizes.launcher, **arguments)
    beyond_s = found["restore_s"] - found["copy_s"]
    yield Row(
        measure="restored in, beyond the copy", ours=beyond_s, limit=0, unit="s", must=Must("<=", 1)
    )
    yield Row(
        measure="restored in (limit: a copy)",
        ours=found["restore_s"],
        limit=found["copy_s"],
        unit="s",
    )
    yield Row(
        measure="read from disk ÷ the state",
        ours=found["read"],
        limit=0,
        unit="ratio",
        must=Must("<=", 0.01),
    )


def _node_rows(folder: Path, quiet: Quiet, sizes: Sizes) -> Iterator[Row]:
    arguments: dict[str, Any] = {
        "folder": str(folder / "checkpoints"),
        "state_mib": sizes.state_mib // NODES,
    }
    launcher = (*TORCHRUN, "--standalone", f"--nproc-per-node={NODES}")
    assert sys.executable == TORCHRUN[0]
    quiet.wait()
    with child(hold_on_nodes, folder / "case", launcher=launcher, **arguments) as killed:
        found = killed.answer()
        for pid in (*found["trainers"], found["writer"]):
            os.kill(pid, signal.SIGKILL)
        peer_s, disk_s = in_child(
            succeed_on_nodes, folder / "new", **sizes.group(NODES), **arguments
        )
    yield Row(measure="held by the peer after it was durable", ours=found["held_s"], unit="s")
    yield Row(
        measure="a lost node restored by its peer in (limit: from disk)",
        ours=peer_s,
        limit=disk_s,
        unit="s",
    )


def hold_on_nodes(*, folder: str, state_mib: int) -> dict[str, Any]:
    """Save on nodes that are this machine by other names, until peers hold the snapshot.

    Returns:
        The processes, and the seconds that it took.

    Raises:
        DoesNotWork: no peer holds the snapshot.
    """
    import torch.distributed as dist

    import holdfast

    rank = _join("old")
    ckpt = holdfast.Checkpointer(folder, peer_memory=True)
    _held.append(ckpt)
    ckpt.save(1, {}, per_rank=_part(rank, state_mib)).result()
    began_s, writer = time.perf_counter(), ckpt._engine._writer
    if not wait_until(lambda: writer.held_step == 1, timeout_s=HELD_S):
        raise DoesNotWork(f"not held after {HELD_S:.0f} s")
    found: list[Any] = [None] * NODES
    dist.all_gather_object(found, (os.getpid(), writer.pid, time.perf_counter() - began_s))
    return {
        "trainers": [trainer for trainer, _, _ in found],
        "writer": found[0][1],
        "held_s": max(held_s for _, _, held_s in found),
    }


def succeed_on_nodes(*, folder: str, state_mib: int) -> list[float]:
    """Restore with a new node 0, and again after memory is released; return the seconds of each.

    Raises:
        DoesNotWork: a wrong state was restored, or from elsewhere.
    """
    import torch.distributed as dist

    import holdfast
    from holdfast.checkpoint import checkpointer  # noqa: F401 - nor is the code, which imports more of torch

    rank, heard = _join("new"), Heard()
    expected, took_s = _part(rank, state_mib), []
    for tier in ("peer_memory", "disk"):
        if rank == 0:
            raw.drop_caches(Path(folder))
        own = {"part": torch.zeros_like(expected["part"])}
        dist.barrier()
        began_s = time.perf_counter()
        holdfast.Checkpointer(folder).restore({}, per_rank=own)
        dist.barrier()
        took_s.append(time.perf_counter() - began_s)
        if rank == 0:
            heard.demand_tier(tier)
        if not torch.equal(own["part"], expected["part"]):
            raise DoesNotWork("something else was restored")
    return took_s


def _join(first: str) -> int:
    """Join as a rank on a separate node; `first` is the first node's name."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["HOLDFAST_NODE"] = f"node-{rank}" if rank else first
    return rank


def _part(rank: int, state_mib: int) -> dict[str, torch.Tensor]:
    return {"part": torch.randn(state_mib * 2**18, generator=torch.Generator().manual_seed(rank))}


def hold(*, folder: str, state_mib: int) -> None:
    """Save, and wait to be killed."""
    workload = _workload(state_mib)
    saver = Ours(Path(folder), workload)
    saver.save(1)
    saver.wait()
    _held.append(saver)


def succeed(*, folder: str, state_mib: int) -> dict[str, Any]:
    """Restore; return the seconds, and the bytes read from disk as a share of the state.

    Raises:
        DoesNotWork: a wrong state was restored, or not from memory.
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
    return {
        "restore_s": restore_s,
        "copy_s": copy_s,
        "read": read / sum(tensor.nbytes for tensor in saved),
    }


def _workload(state_mib: int) -> ManyTensors:
    return ManyTensors(count=TENSORS, tensor_bytes=state_mib * 1024**2 // TENSORS)
