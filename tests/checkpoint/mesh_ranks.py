"""Run one rank of a test: `mesh_ranks.py FOLDER RANK WORLD_SIZE`. Exit with 0 if all is well.

Four ranks train a model that is split by tensor parallelism and FSDP2 on a mesh of two by two, and
save the model with tensors of other placements. Two ranks restore the model, split by tensor
parallelism alone, and one rank restores the model whole.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer

SPLIT = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PLACEMENTS = {
    "both": (Shard(0), Shard(1)),
    "crossed": (Shard(1), Shard(0)),
    "twice": (Shard(0), Shard(0)),
    "one": (Replicate(), Shard(1)),
    "none": (Replicate(), Replicate()),
}
SIZES = (7, 5)


class Block(torch.nn.Module):
    """A block whose sizes do not divide by four."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, batch):
        return self.down(torch.relu(self.up(batch)))


def made(seed):
    torch.manual_seed(seed)
    return Block()


def values():
    return {name: torch.arange(35.0).view(SIZES) + number for number, name in enumerate(PLACEMENTS)}


def whole(tensors):
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in tensors.items()
    }


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def moments(model, optimizer):
    states = ShardedOptimizer(model, optimizer).state_dict()["state"]
    return {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }


def four_save(folder, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(made(1), mesh["tensor"], dict(SPLIT))
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    tensors = {
        name: distribute_tensor(value, mesh, PLACEMENTS[name]) for name, value in values().items()
    }
    for step in (1, 2):
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpointer(folder / "saved") as ckpt:
        ckpt.save(
            2, {"model": model, "optimizer": ShardedOptimizer(model, optimizer), "tensors": tensors}
        )
    expected = whole(model.state_dict()), whole(moments(model, optimizer))
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    # The same ranks restore again, from other values.
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter.to_local())
    again = {name: torch.zeros_like(value) for name, value in tensors.items()}
    with Checkpointer(folder / "saved") as ckpt:
        state = {"model": model, "optimizer": ShardedOptimizer(model, optimizer), "tensors": again}
        assert ckpt.restore(state) == 2
    same(whole(model.state_dict()), expected[0])
    same(whole(moments(model, optimizer)), expected[1])
    same(whole(again), values())


def two_restore(folder):
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(made(2), mesh, dict(SPLIT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    tensors = {
        name: distribute_tensor(torch.zeros(SIZES), mesh, [Shard(number % 2)])
        for number, name in enumerate(PLACEMENTS)
    }
    with Checkpointer(folder / "saved") as ckpt:
        state = {
            "model": model,
            "optimizer": ShardedOptimizer(model, optimizer),
            "tensors": tensors,
        }
        assert ckpt.restore(state) == 2
    expected = torch.load(folder / "expected.pt")
    same(whole(model.state_dict()), expected[0])
    same(whole(moments(model, optimizer)), expected[1])
    same(whole(tensors), values())


def main():
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(str(folder / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if world_size == 4:
        four_save(folder, rank)
    else:
        two_restore(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
