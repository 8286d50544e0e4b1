"""Run one rank of a test: `dcp_ranks.py FOLDER RANK WORLD_SIZE`. Exit with 0 if all is well."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.checkpoint.integrations.dcp_staging import SharedStager
from holdfast.checkpoint.integrations.dcp_storage import HoldfastReader, HoldfastWriter, step_path


def a_state(mesh, step):
    whole = torch.arange(15.0).reshape(5, 3) + step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "alike": torch.full((2,), float(step)),
    }


def main():
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))
    dcp.save(a_state(mesh, 1), checkpoint_id=step_path(folder, 1), storage_writer=HoldfastWriter())
    for step, kind in enumerate(AsyncCheckpointerType, 2):
        stager = SharedStager()
        state = a_state(mesh, step)
        saved = dcp.async_save(
            state,
            checkpoint_id=step_path(folder, step),
            storage_writer=HoldfastWriter(),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        state["sharded"].to_local().fill_(-1)
        saved.result()
        stager.close()
        fresh = a_state(mesh, 50)
        dcp.load(fresh, checkpoint_id=step_path(folder, step), storage_reader=HoldfastReader())
        expected = a_state(mesh, step)["sharded"]
        assert torch.equal(fresh["sharded"].full_tensor(), expected.full_tensor())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
