"""Run one rank of a test of two: `fsdp2_ranks.py FOLDER RANK`. Exit with 0 if all is well.

Two ranks train, save, restore and go on; then the first rank does so alone. FOLDER also holds the
expected parameters.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer


def make(seed, *, sharded=True):
    """Return a model with a buffer, and with sizes that do not divide by two."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3, bias=False)
    )
    model.register_buffer("scale", torch.ones(2))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        loss = model(batch[rank::world_size]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole(model, optimizer):
    """Return all tensors of model and optimizer, unsharded."""
    found = {
        **model.state_dict(),
        **_tensors(ShardedOptimizer(model, optimizer).state_dict()["state"]),
    }
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def _tensors(state):
    return {f"{name}.{key}": value for name, part in state.items() for key, value in part.items()}


def restored(folder, *, sharded=True):
    model, optimizer = make(seed=9, sharded=sharded)
    with Checkpointer(folder) as ckpt:
        assert ckpt.restore({"model": model, "optimizer": ShardedOptimizer(model, optimizer)}) == 3
    return model, optimizer


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def of_two(folder, rank):
    model, optimizer = make(seed=1)
    run(model, optimizer, [1, 2, 3])
    with Checkpointer(folder / "saved") as ckpt:
        ckpt.save(3, {"model": model, "optimizer": ShardedOptimizer(model, optimizer)})
        at_three = {name: value.clone() for name, value in whole(model, optimizer).items()}
        run(model, optimizer, [4, 5])
    assert isinstance(model[0].weight, DTensor)
    again = restored(folder / "saved")
    same(whole(*again), at_three)
    run(*again, [4, 5])
    same(whole(*again), whole(model, optimizer))
    if rank == 0:
        torch.save(at_three, folder / "at-three.pt")


def main():
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    of_two(folder, rank)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'alone'}", rank=0, world_size=1
        )
        same(
            whole(*restored(folder / "saved")),
            torch.load(folder / "at-three.pt", weights_only=True),
        )
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
