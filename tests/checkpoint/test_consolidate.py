import os
import pickle
import shutil
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.convert import consolidate
from holdfast.checkpoint.convert.consolidate import consolidate_checkpoint
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.core.errors import BadUse, CheckpointError, NotFound


def stock_save(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    training = Training().run(3)
    with Checkpointer(tmp_path_factory.mktemp("saved")) as ckpt:
        state = {
            **training.objects,
            "n": 3,
            "empty": {},
            "nested": [{"a": torch.ones(2)}, 1],
            'odd "key"': {7: None},
        }
        path = ckpt.save(3, state, per_rank={"position": 12}).result()
    return training, path


@pytest.fixture
def trained(saved, tmp_path):
    """Return a training and its checkpoint."""
    training, path = saved
    return training, shutil.copytree(path, tmp_path / "checkpoints" / path.name)


def load(path):
    return torch.load(path, weights_only=True)


def test_the_state_comes_back_as_it_was_passed(trained, tmp_path):
    training, path = trained
    seen = []
    written = consolidate_checkpoint(
        path, tmp_path / "one.pt", progress=lambda done, total: seen.append((done, total))
    )
    state = load(tmp_path / "one.pt")
    for name, each in training.objects.items():
        assert_same(
            state[name], each.state_dict() if name != "model" else dict(each.state_dict()), name
        )
    assert (state["n"], state["empty"], state['odd "key"']) == (3, {}, {7: None})
    assert state["nested"][1] == 1
    assert state["nested"][0]["a"].tolist() == [1, 1]
    assert state["holdfast"]["step"] == 3
    (rank,) = state["holdfast"]["ranks"]
    assert rank["user"] == {"position": 12}
    assert "torch" in rank["rng"]
    assert written.entries == list(state)
    assert written.size_bytes == (tmp_path / "one.pt").stat().st_size
    assert seen[-1][0] == seen[-1][1] > 0
    fresh = Training(seed=1)
    fresh.model.load_state_dict(state["model"])
    fresh.optimizer.load_state_dict(state["optimizer"])


def test_large_states_are_read_in_groups(trained, tmp_path, monkeypatch):
    training, path = trained
    monkeypatch.setattr(consolidate, "_AT_ONCE_BYTES", 100)
    consolidate_checkpoint(path, tmp_path / "one.pt")
    assert_same(load(tmp_path / "one.pt")["model"], dict(training.model.state_dict()))


def test_only_some_entries(trained, tmp_path):
    _training, path = trained
    assert consolidate_checkpoint(path, tmp_path / "one.pt", entries=["model"]).tensors == 9
    assert list(load(tmp_path / "one.pt")) == ["model"]
    with pytest.raises(BadUse, match=r"has no entry 'optimiser'\. It has: model, "):
        consolidate_checkpoint(path, tmp_path / "two.pt", entries=["optimiser"])


def test_one_that_dcp_alone_wrote(trained, tmp_path):
    training, _path = trained
    stock_save(
        tmp_path / "plain",
        {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()},
    )
    consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")
    state = load(tmp_path / "one.pt")
    assert_same(state["optimizer"], training.optimizer.state_dict())
    assert list(state) == ["model", "optimizer"]


def test_a_value_that_would_run_code_is_not_read_and_the_rest_can_be_had(tmp_path):
    stock_save(tmp_path / "plain", {"t": torch.ones(2), "evil": timedelta(1)})
    with pytest.raises(CheckpointError, match="'evil' is not a plain value"):
        consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")
    consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt", entries=["t"])
    assert load(tmp_path / "one.pt")["t"].tolist() == [1, 1]


def test_damage_is_found_before_anything_is_written(trained, tmp_path):
    _training, path = trained
    data = next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"is damaged: .* does not match its checksum, .*\. Take another checkpoint\.",
    ):
        consolidate_checkpoint(path, tmp_path / "one.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_two_saves_of_a_step_are_never_mixed(tmp_path, monkeypatch):
    """The job saves the step again during the read."""
    monkeypatch.setattr(consolidate, "_AT_ONCE_BYTES", 1)

    def saved(value):
        with Checkpointer(tmp_path / "checkpoints") as ckpt:
            return ckpt.save(
                3, {name: torch.full((300_000,), float(value)) for name in "ab"}
            ).result()

    path = saved(1)
    again = []
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        consolidate_checkpoint(
            path, tmp_path / "one.pt", progress=lambda *_: again or again.append(saved(2))
        )
    assert again
    assert not (tmp_path / "one.pt").exists()


def test_damage_of_one_that_dcp_alone_wrote_is_found(tmp_path):
    stock_save(tmp_path / "plain", {"t": torch.ones(1000)})
    data = tmp_path / "plain" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes()) + 400] ^= 1
    data.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"is damaged: 't' in __0_0.distcp is damaged: Bad CRC-32"
    ):
        consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")
    assert not (tmp_path / "one.pt").exists()


def test_metadata_that_promises_more_than_the_file_has_allocates_nothing(tmp_path):
    stock_save(tmp_path / "plain", {"t": torch.ones(2)})
    metadata = read_dcp_metadata(tmp_path / "plain")
    saved = metadata.state_dict_metadata["t"]
    saved.size = saved.chunks[0].sizes = torch.Size([1 << 50])
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"is damaged: 't' has \d+ of its \d+ bytes"):
        consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")


@pytest.mark.parametrize("paths", [{"t": ("t",), "nowhere": ("nowhere",)}, {}])
def test_what_dcp_says_of_where_a_value_belongs_may_lack_some_or_name_others(tmp_path, paths):
    stock_save(tmp_path / "plain", {"t": torch.ones(2), "n": 3})
    metadata = read_dcp_metadata(tmp_path / "plain")
    metadata.planner_data = paths
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(metadata))
    consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")
    assert load(tmp_path / "one.pt")["n"] == 3


@pytest.mark.parametrize("paths", [{"t": 5}, {7: ("t",)}])
def test_places_that_are_none_are_damage(tmp_path, paths):
    stock_save(tmp_path / "plain", {"t": torch.ones(2)})
    metadata = read_dcp_metadata(tmp_path / "plain")
    metadata.planner_data = paths
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"is damaged: its metadata (says|has)"):
        consolidate_checkpoint(tmp_path / "plain", tmp_path / "one.pt")


def test_the_file_is_whole_or_absent(trained, tmp_path, monkeypatch):
    """torch hides the reason of a full disk, and the error must name the disk."""
    _training, path = trained

    def full(_fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device.*one\.pt"):
            consolidate_checkpoint(path, tmp_path / "one.pt")

    def failing(_state, _file):
        raise RuntimeError("unexpected pos 64 vs 0") from OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match=r"No space left on device.*one\.pt"):
        consolidate_checkpoint(path, tmp_path / "one.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_where_nobody_may_write_nothing_is_read(trained, monkeypatch):
    _training, path = trained
    monkeypatch.setattr(consolidate, "_read", None)
    with pytest.raises(OSError, match=r"/proc/one\.pt"):
        consolidate_checkpoint(path, Path("/proc/one.pt"))


def test_what_could_not_be_loaded_again_is_not_written(trained, tmp_path, monkeypatch):
    _training, path = trained

    def refuse(*_arguments, **_named):
        raise ValueError("Unsupported operand\nand much more")

    monkeypatch.setattr(consolidate, "_read", lambda *_: {})
    monkeypatch.setattr(consolidate, "fill", lambda *_: {"n": 3})
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(consolidate, "_skeleton", lambda *_: {"n": "n"})
    with pytest.raises(
        CheckpointError, match=r"was not written: .*weights_only=True \(Unsupported operand\)"
    ):
        consolidate_checkpoint(path, tmp_path / "one.pt")
    assert not (tmp_path / "one.pt").exists()


def test_nothing_is_overwritten_and_what_is_missing_is_named(trained, tmp_path):
    _training, path = trained
    (tmp_path / "one.pt").write_text("mine")
    with pytest.raises(BadUse, match="exists already"):
        consolidate_checkpoint(path, tmp_path / "one.pt")
    with pytest.raises(NotFound, match=r"There is no folder .*nowhere\. Make it first\."):
        consolidate_checkpoint(path, tmp_path / "nowhere" / "one.pt")
    with pytest.raises(NotFound, match="There is no checkpoint"):
        consolidate_checkpoint(tmp_path / "nowhere", tmp_path / "two.pt")
    assert (tmp_path / "one.pt").read_text() == "mine"
