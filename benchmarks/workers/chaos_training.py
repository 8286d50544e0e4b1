"""Train on one rank of the job of `chaos.py`: two gloo ranks, DDP, buffers written in forward.

    chaos_training.py STEPS [--save-every N] [--step-s SECONDS] [--queue-mib MIB] [--checkpoints
    DIR] [--bare]

The results of each step follow from the seed, the batch, the rank and the state, dropout's random
generator included. After each step, rank R adds a line `pid step` to `steps-R.txt` of the current
folder. In the end, rank R writes the digests of its state to `final-R.json`. Only rank 0 writes the
digests of the buffers, since DDP overwrites the other ranks' buffers at the next step. With
`--bare`, the script trains without Holdfast, and leaves out the batches that `$HOLDFAST_LEAVE_OUT`
names.

Each rank holds a lock of its own while it trains. A second process of that rank writes its pid to
`twice.txt` and ends.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.testing import RankFaults

SEED = 7
WIDTH, BATCH, BLOCKS, EXPERTS, CLASSES = 64, 16, 6, 8, 10
BALANCE = 1e-3
"""The change of an expert's bias in a step, as DeepSeek-V3 balances its load."""


class Model(nn.Module):
    """A model with BatchNorm, a queue of features (as in MoCo), and balanced experts."""

    def __init__(self, queue_length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(BLOCKS)
        )
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("queue", F.normalize(torch.randn(queue_length, WIDTH), dim=1))
        self.register_buffer("queue_at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class scores, and the similarity to the queue."""
        features = inputs
        for block in self.blocks:
            features = features + block(features)
        scores = self.gate(features)
        chosen = (scores + self.expert_bias).argmax(dim=1)
        weight = scores.sigmoid().gather(1, chosen[:, None])
        features = F.normalize(features + weight * self.experts[chosen], dim=1)
        similarity = features @ self.queue[:: max(1, len(self.queue) // 256)].clone().T
        with torch.no_grad():
            load = torch.bincount(chosen, minlength=EXPERTS)
            self.tokens_per_expert += load
            self.expert_bias += BALANCE * (load.float().mean() - load).sign()
            at = int(self.queue_at)
            self.queue[at : at + len(features)] = features
            self.queue_at.fill_((at + len(features)) % len(self.queue))
        return self.head(features), similarity


def batch_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the data of a batch, independent of all that happened before."""
    source = torch.Generator().manual_seed(SEED + 2 * number + rank)
    return torch.randn(BATCH, WIDTH, generator=source), torch.randint(
        CLASSES, (BATCH,), generator=source
    )


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    model = Model(args.queue_mib * 2**20 // (4 * WIDTH))
    torch.manual_seed(SEED + 1 + rank)  # for the dropout
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    run, faults = holdfast.attach(), RankFaults()
    # More than the steps: some are left out.
    batches = run.batches(range(1, 2 * args.steps + 10_000))
    ckpt = None if args.bare else holdfast.Checkpointer(args.checkpoints, every=args.save_every)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    position = {"batches": batches}
    with ckpt or contextlib.nullcontext(), Path(f"steps-{rank}.txt").open("a") as journal:
        start = 0 if ckpt is None else ckpt.restore(state, per_rank=position)
        steps = range(start + 1, args.steps + 1)
        for step, number in zip(steps, batches if steps else (), strict=False):
            began_s = time.monotonic()
            inputs, targets = batch_of(number, rank)
            scores, similarity = parallel(faults.batch(number, inputs))
            loss = F.cross_entropy(scores, targets) + similarity.logsumexp(dim=1).mean() * 0.1
            optimizer.zero_grad()
            faults.before_backward(model.parameters())
            loss.backward()
            optimizer.step()
            schedule.step()
            time.sleep(max(0.0, args.step_s - (time.monotonic() - began_s)))
            journal.write(f"{os.getpid()} {step}\n")
            journal.flush()
            run.step(step, loss=loss)
            if ckpt is not None:
                ckpt.save(step, state, per_rank=position, force=step == args.steps)
    held: dict[str, Any] = {name: each.state_dict() for name, each in state.items()}
    held["random generator"] = torch.get_rng_state()
    if rank:
        held["model"] = dict(model.named_parameters())
    final = Path(f"final-{rank}.json")
    final.with_suffix(".tmp").write_text(json.dumps(dict(digests(held))))
    final.with_suffix(".tmp").replace(final)
    dist.barrier()


def digests(held: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and digest of each leaf of a state dict."""
    if isinstance(held, Mapping | Sequence) and not isinstance(held, str):
        pairs = held.items() if isinstance(held, Mapping) else enumerate(held)
        for key, value in pairs:
            yield from digests(value, f"{name}.{key}" if name else str(key))
    elif isinstance(held, Tensor):
        content = held.detach().contiguous().numpy().tobytes()
        yield name, f"{held.dtype} {tuple(held.shape)} {hashlib.sha256(content).hexdigest()}"
    else:
        yield name, repr(held)


def hold_lock(rank: str) -> None:
    """Lock a file for the life of this process; exit if another process of this rank lives."""
    descriptor = os.open(f"rank-{rank}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with Path("twice.txt").open("a") as twice:
            twice.write(f"rank {rank}: {os.getpid()} at {time.time()}\n")
        raise SystemExit(f"rank {rank} is trained twice") from None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--queue-mib", type=int, default=4)
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--bare", action="store_true")
    hold_lock(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    train(parser.parse_args())
    gc.collect()  # the DDP module would keep the group's threads beyond the group's end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
