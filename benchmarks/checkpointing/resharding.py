"""Restore shards of many ranks on fewer; count how often their bytes are read from disk."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpointing import raw
from checkpointing.child import in_child
from checkpointing.heard import read_so_far
from checkpointing.sizes import Sizes
from common.jobs import DoesNotWork
from common.machine import Quiet
from common.table import Must, Row

TENSORS = 16
WIDTH = 256
"""The length of a tensor's row, in numbers of 4 bytes."""


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield the bytes that all ranks read, as if alone on their nodes, over the bytes needed."""
    del rounds
    before, after = sizes.ranks
    arguments: dict[str, Any] = {"folder": str(folder), "shard_mib": sizes.shard_mib}
    in_child(save, folder / "saving", **sizes.group(before), **arguments)
    # Under another name, no snapshot in memory matches the checkpoint.
    (folder / "saved").rename(folder / "ours")
    quiet.wait()
    found = in_child(load, folder / "loading", **sizes.group(after), **arguments)
    yield Row(
        measure=f"{before} ranks' shards on {after}: bytes read ÷ needed [dcp.load]",
        ours=found["ours"],
        peer=found["peer"],
        limit=1,
        unit="ratio",
        must=Must("<=", 1.05),
    )


def save(*, folder: str, shard_mib: int) -> None:
    """Save the same shards with Holdfast and with DCP."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict_saver

    import holdfast

    state = _state(shard_mib, fill=True)
    with holdfast.Checkpointer(Path(folder) / "saved") as ckpt:
        ckpt.save(1, {"model": state}).result()
    state_dict_saver.save({"model": state}, checkpoint_id=Path(folder) / "peer")
    dist.barrier()


def load(*, folder: str, shard_mib: int) -> dict[str, float]:
    """Return bytes read over bytes needed, over all ranks.

    Raises:
        DoesNotWork: a wrong state was restored, or less was read than needed.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict_loader

    import holdfast

    expected, place = _state(shard_mib, fill=True), Path(folder)
    needed: int = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())

    def ratio(name: str, restore: Callable[[dict[str, Any]], object]) -> float:
        state = _state(shard_mib, fill=False)
        if dist.get_rank() == 0:
            raw.drop_caches(place / name)
        dist.barrier()
        before = read_so_far()
        restore({"model": state})
        own = max(after - earlier for after, earlier in zip(read_so_far(), before, strict=True))
        by_all = torch.tensor(float(own), dtype=torch.float64)
        dist.all_reduce(by_all)
        read: float = by_all.item()
        if not all(torch.equal(state[key].to_local(), expected[key].to_local()) for key in state):
            raise DoesNotWork(f"something else was restored from {name}")
        if read < needed / 2:
            raise DoesNotWork(f"{name} was read in a way that is not counted")
        return read / needed

    def peer(state: dict[str, Any]) -> None:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            state_dict_loader.load(state, checkpoint_id=place / "peer")

    with holdfast.Checkpointer(place / "ours") as ckpt:
        ours = ratio("ours", ckpt.restore)
    return {"ours": ours, "peer": ratio("peer", peer)}


def _state(shard_mib: int, *, fill: bool) -> dict[str, Any]:
    """Return sharded tensors whose rows no number of ranks divides; equal for any number."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = shard_mib * 1024**2 // (4 * WIDTH * TENSORS) + 1
    torch.manual_seed(0)
    make = torch.randn if fill else torch.zeros
    return {
        f"weight{i}": distribute_tensor(make(count, WIDTH), mesh, [Shard(0)])
        for i in range(TENSORS)
    }
