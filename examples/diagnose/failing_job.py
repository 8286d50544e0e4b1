"""A small job that really fails, and what is said of it, as a library: one of two ranks asks for a setting nobody gave.

python examples/diagnose/failing_job.py [--out FOLDER]
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from holdfast.diagnose import diagnose

SETTINGS = {"lr": 0.1}


def train() -> None:
    """What each rank runs: the other rank waits for the one that fails, and fails in turn."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.zeros(1)
    for step in range(1, 6):
        if rank == 1 and step == 4:
            print(SETTINGS["warmup"])
        dist.all_reduce(total)
        print(f"step {step} loss {1 / step:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("failed-job"))
    folder = parser.parse_args().out
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run([*torchrun, "--log-dir", folder, "--redirects", "3", __file__], check=False)

    found = diagnose(folder)
    print(f"{found.summary} ({found.category}, confidence {found.confidence:.2f})")
    print(f"who: {dict(found.scope)}; next: {found.action}, a restart helps: {found.restart_helps}")
    print(found.mitigation)
    for line in found.evidence:
        print(f"{line.role:<9} {Path(line.file).relative_to(folder)}:{line.line}: {line.text}")


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
