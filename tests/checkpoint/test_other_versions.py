"""Restore checkpoints that stock DCP of other PyTorch versions wrote (`make_dcp_fixture.py`)."""

from pathlib import Path

import pytest
import torch
from checkpoint_training import assert_same
from make_dcp_fixture import expected

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.convert.import_dcp import import_dcp
from holdfast.checkpoint.convert.plain_dcp import verify_plain_dcp

FIXTURES = sorted((Path(__file__).parent / "dcp_fixtures").iterdir())


def emptied(value):
    """Return the same structure with other values."""
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_what_another_version_wrote_is_checked_and_restored(tmp_path, fixture):
    assert verify_plain_dcp(fixture).state == "checked"
    import_dcp(fixture, tmp_path, 5)
    state = emptied(expected())
    assert Checkpointer(tmp_path).restore(state) == 5
    assert_same(state, expected())


def test_there_are_older_and_newer_ones():
    assert len(FIXTURES) >= 3
