"""Test FSDP2 (`fully_shard`) on gloo: saved by two ranks, restored by two, by one, and unsharded."""

import fsdp2_ranks
import pytest
import torch
from started_ranks import RANK, run_ranks

from holdfast.checkpoint import scan, verify


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    """Run all scenarios on two ranks and then one, each with its own checks; return the folder."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(2, fsdp2_ranks.__file__, folder, RANK)
    return folder


def test_ranks_save_their_shards_and_restore_them(saved_by_two):
    (info,) = scan(saved_by_two / "saved")
    assert verify(info).state == "verified"
    assert len(list(info.path.glob("__?_0.distcp"))) == 2


def test_a_model_that_is_not_sharded_takes_it_and_trains_on(saved_by_two):
    model, optimizer = fsdp2_ranks.restored(saved_by_two / "saved", sharded=False)
    expected = torch.load(saved_by_two / "at-three.pt", weights_only=True)
    fsdp2_ranks.same(fsdp2_ranks.whole(model, optimizer), expected)
    fsdp2_ranks.run(model, optimizer, [4])
    assert not torch.equal(model[0].weight, expected["0.weight"])
