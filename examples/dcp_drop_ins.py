"""A loop that saves with PyTorch Distributed Checkpoint, with Holdfast's writer, reader and stager in it.

python examples/dcp_drop_ins.py --checkpoints /tmp/dcp
"""

import argparse
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.checkpoint import scan
from holdfast.checkpoint.integrations.dcp_staging import SharedStager
from holdfast.checkpoint.integrations.dcp_storage import HoldfastReader, HoldfastWriter, step_path
from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": ShardedOptimizer(model, optimizer)}
    start = 0
    Path(args.checkpoints).mkdir(parents=True, exist_ok=True)
    if found := scan(args.checkpoints):  # newest first
        start = found[0].step
        dcp.load(state, checkpoint_id=found[0].path, storage_reader=HoldfastReader())
    print(f"from step {start}", flush=True)

    stager, saved = SharedStager(), Future[Any]()
    saved.set_result(None)
    for step in range(start + 1, args.steps + 1):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0:
            saved.result()  # raises if the save before is not durable
            path = step_path(args.checkpoints, step)
            saved = dcp.async_save(
                state, checkpoint_id=path, storage_writer=HoldfastWriter(), async_stager=stager
            )
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    saved.result()
    stager.close()


if __name__ == "__main__":
    main()
