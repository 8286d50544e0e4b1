"""Write the fixture of one version of PyTorch: `make_dcp_fixture.py FOLDER`, run by that version.

Two ranks save one state with stock DCP; `expected` returns each value. Only torch is needed.
"""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SHARDED = {"rows": Shard(0), "columns": Shard(1), "alike": Replicate()}


def expected():
    """Return the whole state."""
    return {
        "model": {
            **{name: torch.arange(35.0).view(7, 5) + number for number, name in enumerate(SHARDED)},
            "bf16": torch.arange(6).to(torch.bfloat16),
            "f8": torch.arange(6.0).to(torch.float8_e4m3fn),
            "flags": torch.tensor([True, False]),
            "count": torch.tensor(7),
            "none": torch.empty(0, 3),
            "turned": torch.arange(6.0).view(2, 3).t(),
        },
        "optimizer": {
            "state": {
                number: {"step": torch.tensor(3.0), "exp_avg": torch.full((4,), float(number))}
                for number in (0, 1)
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "foreach": None, "params": [0, 1]}],
        },
        "epoch": 3,
        "note": "tokens",
    }


def save(folder, rank, store):
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = expected()
    for name, placement in SHARDED.items():
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [placement])
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    dist.destroy_process_group()


def main(folder, *rank_and_store):
    if rank_and_store:
        save(folder, int(rank_and_store[0]), rank_and_store[1])
        return
    path = Path(folder) / f"torch-{torch.__version__.split('+')[0]}"
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, str(path)]
        ranks = [subprocess.Popen([*command, str(rank), f"{meeting}/store"]) for rank in range(2)]
        sys.exit(max(each.wait() for each in ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
