"""Ranks that share one model by FSDP2 (`fully_shard`); another number of them goes on from the same checkpoints.

torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoints /tmp/fsdp2
torchrun --nproc-per-node 1 examples/fsdp2.py --checkpoints /tmp/fsdp2 --steps 300
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which it would else keep alive for ever
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer
from holdfast.demo.corpus import load_corpus

CONTEXT = 24


class ByteModel(nn.Module):
    """Logits of shape (batch, 256) for the byte after windows of shape (batch, CONTEXT)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList([nn.Linear(8 * CONTEXT, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        hidden = self.embedding(tokens).flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(hidden)


def draw(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step, which depends on nothing else: no position has to be saved."""
    starts = torch.randint(
        len(text) - CONTEXT - 1, (32,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([text[start : start + CONTEXT + 1].long() for start in starts.tolist()])
    mine = windows[dist.get_rank() :: dist.get_world_size()]
    return mine[:, :-1], mine[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # the model: a gloo group that outlives the next line can abort a clean exit
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = load_corpus().train

    run = holdfast.attach()  # Holdfast (1)
    ckpt = holdfast.Checkpointer(args.checkpoints, every=args.save_every, keep=3)  # Holdfast (2)
    state = {"model": model, "optimizer": ShardedOptimizer(model, optimizer)}
    start = ckpt.restore(state)

    for step in range(start + 1, args.steps + 1):
        inputs, targets = draw(text, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        run.step(step, loss=loss)  # Holdfast (3)
        ckpt.save(step, state)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    ckpt.close()


if __name__ == "__main__":
    main()
