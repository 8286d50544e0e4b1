"""Test states that are split along several mesh dimensions, restored on other meshes."""

from pathlib import Path

import pytest
import torch
from mesh_ranks import SIZES, made, moments, same, values
from started_ranks import RANK, run_ranks

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer

SCRIPT = Path(__file__).parent / "mesh_ranks.py"


def run(folder, world_size):
    outputs = run_ranks(world_size, SCRIPT, folder, RANK, world_size)
    assert "differs by rank" not in "\n".join(outputs)


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    run(folder, 4)
    return folder


@pytest.mark.slow
def test_two_ranks_restore_what_four_saved_on_a_mesh_of_two_by_two(of_four_ranks):
    run(of_four_ranks, 2)


@pytest.mark.slow
def test_one_restores_it_whole(of_four_ranks):
    model = made(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensors = {name: torch.zeros(SIZES) for name in values()}
    with Checkpointer(of_four_ranks / "saved") as ckpt:
        state = {
            "model": model,
            "optimizer": ShardedOptimizer(model, optimizer),
            "tensors": tensors,
        }
        assert ckpt.restore(state) == 2
    expected = torch.load(of_four_ranks / "expected.pt")
    same(model.state_dict(), expected[0])
    same(moments(model, optimizer), expected[1])
    same(tensors, values())
