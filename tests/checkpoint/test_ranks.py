"""Test two real processes over gloo, and one process that restores their checkpoints."""

from pathlib import Path

import pytest
import torch
from started_ranks import run

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.core.errors import StateMismatch

SCRIPT = Path(__file__).parent / "rank_script.py"


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """Run all scenarios on two ranks, each with its own checks; return the folder."""
    folder = tmp_path_factory.mktemp("ranks")
    run(SCRIPT, folder, 2)
    return folder


def test_ranks_act_as_one_when_something_is_wrong_on_one(of_two_ranks):
    assert [info.step for info in scan(of_two_ranks / "errors_are_shared")] == [1]
    assert [verify(info).state for info in scan(of_two_ranks / "fallback")] == [
        "damaged",
        "verified",
    ]


def test_two_ranks_save_and_one_restores(of_two_ranks, caplog):
    folder = of_two_ranks / "round_trip"
    stored = read_dcp_metadata(folder / "step-0000000002").storage_data
    names = [index.fqn for index in stored]
    # Equal values are stored once; values that differ by rank are stored for each rank.
    assert names.count("model.0.weight") == 1
    assert names.count("note") == 1
    assert {"holdfast.rank-0.user.position", "holdfast.rank-1.user.position"} <= set(names)

    before = torch.get_rng_state()
    state = {"note": ""}
    ckpt = Checkpointer(folder)
    assert ckpt.restore(state) == 2
    assert state == {"note": "the same"}
    assert torch.equal(torch.get_rng_state(), before)
    assert "random generators were not restored" in caplog.text
    assert "saved by 2 ranks and is restored by 1" in caplog.text
    state = {"note": ""}
    with pytest.raises(
        StateMismatch, match=r"saved by 2 ranks .* by 1.*per_rank_states\(2\), and distribute them"
    ):
        ckpt.restore(state, per_rank={"position": 0})
    assert state == {"note": ""}
    positions = [each["position"] for each in ckpt.per_rank_states(2)]
    assert positions == [1000, 1001]


def test_parts_and_shards_of_two_ranks_are_restored_whole_by_one(of_two_ranks):
    folder = of_two_ranks / "different_parts"
    state = {"layers": {}, "sharded": torch.zeros(6, 2)}
    Checkpointer(folder).restore(state)
    assert torch.equal(state["sharded"], torch.arange(12.0).view(6, 2))
    assert {key: value.tolist() for key, value in state["layers"].items()} == {0: [0, 0], 1: [1, 1]}
