"""Data-parallel ranks under torchrun: a recurrent network that predicts each next byte.

torchrun --nproc-per-node 2 examples/ddp.py --checkpoints /tmp/ddp
holdfast run -- torchrun --nproc-per-node 2 examples/ddp.py --checkpoints /tmp/ddp
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which it would else keep alive for ever
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.demo.corpus import Sampler, load_corpus


class ByteModel(nn.Module):
    """Logits of shape (batch, bytes, 256) for bytes of shape (batch, bytes)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.memory(self.embedding(tokens))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # the DDP module: a gloo group that outlives the next line can abort a clean exit
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteModel()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = Sampler(load_corpus().train, batch_size=16, context=48, seed=0, rank=rank)

    run = holdfast.attach()  # Holdfast (1)
    ckpt = holdfast.Checkpointer(args.checkpoints, every=args.save_every, keep=3)  # Holdfast (2)
    # The model itself, not its DDP wrapper: the checkpoint then loads without DDP as well.
    state = {"model": model, "optimizer": optimizer}
    # Each rank reads other windows of the text. Under `state` they would be taken for copies of one value.
    position = {"sampler": sampler}
    start = ckpt.restore(state, per_rank=position)

    for step in range(start + 1, args.steps + 1):
        inputs, targets = sampler.draw()
        loss = nn.functional.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        run.step(step, loss=loss)  # Holdfast (3)
        ckpt.save(step, state, per_rank=position)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    ckpt.close()


if __name__ == "__main__":
    main()
