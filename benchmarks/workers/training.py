"""A rank of a small training job: the same script for every launcher that `recover.py` compares.

Predicts the next byte of a module of the standard library, data-parallel over gloo, and stretches
each step to `--step-s`. After each step a line `time pid step` is added to `steps-RANK.txt` of the
current folder. `--bare`: without Holdfast and without checkpoints, for the least that a start can
cost. Under ft_launcher, each step sends a heartbeat, by which that finds hangs. After SIGUSR1, the
rank waits for a lock that it holds itself.
"""

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program
from torch.nn.parallel import DistributedDataParallel

CONTEXT, BATCH, WIDTH = 32, 32, 128


def deadlock(*_: object) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-s", type=float, default=0.06)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--bare", action="store_true")
    args = parser.parse_args()

    signal.signal(signal.SIGUSR1, deadlock)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    text = torch.tensor(list(Path(json.__file__).with_name("decoder.py").read_bytes()))
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 256),
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start, run, ckpt = 0, None, None
    state = {"model": model, "optimizer": optimizer}
    if not args.bare:
        import holdfast

        run = holdfast.attach()
        ckpt = holdfast.Checkpointer("checkpoints", every=args.save_every)
        start = ckpt.restore(state)

    monitor = None
    if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
        monitor.init_workload_monitoring()

    with Path(f"steps-{rank}.txt").open("a") as journal:
        for step in range(start + 1, args.steps + 1):
            began_s = time.monotonic()
            at = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT + 1)
            tokens = text[at]
            loss = F.cross_entropy(parallel(tokens[:, :-1]), tokens[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, args.step_s - (time.monotonic() - began_s)))
            journal.write(f"{time.time()} {os.getpid()} {step}\n")
            journal.flush()
            if monitor is not None:
                monitor.send_heartbeat()
            if run is not None and ckpt is not None:
                run.step(step, loss=loss)
                ckpt.save(step, state)


if __name__ == "__main__":
    main()
