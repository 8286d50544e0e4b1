"""Test the import of checkpoints that DCP alone wrote."""

import itertools
import os
import pickle
import random
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same
from forked_work import FORKS

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.convert.import_dcp import import_dcp
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.checkpoint.format.paths import step_path
from holdfast.core.errors import BadUse, CheckpointError, NotFound, StateMismatch

KILLS = 6


def stock_save(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return path


@pytest.fixture
def plain(tmp_path):
    return stock_save(tmp_path / "plain", {"a": torch.arange(100_000.0), "n": 7, "s": "text"})


def test_training_goes_on_from_what_dcp_alone_wrote(tmp_path, caplog):
    ours = Training().run(3)
    state = {"model": ours.model.state_dict(), "optimizer": ours.optimizer.state_dict(), "n": 3}
    plain, folder = stock_save(tmp_path / "plain", state), tmp_path / "checkpoints"
    os.utime(plain / ".metadata", (1e9, 1e9))
    imported = import_dcp(plain, folder, torch.tensor(3))
    assert (imported.path, imported.unchecked) == (step_path(folder, 3), "")
    (info,) = scan(folder)
    assert (verify(info).state, info.created_at_s, info.size_bytes) == (
        "verified",
        1e9,
        imported.size_bytes,
    )

    fresh = Training(seed=1)
    state = {"model": fresh.model, "optimizer": fresh.optimizer, "n": 0}
    before = torch.get_rng_state()
    assert Checkpointer(folder).restore(state) == 3
    assert state["n"] == 3
    assert_same(fresh.model.state_dict(), ours.model.state_dict())
    assert_same(fresh.optimizer.state_dict(), ours.optimizer.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert "random generators were not restored" in caplog.text
    with pytest.raises(StateMismatch, match="no 'position'"):
        Checkpointer(folder).restore({"n": 0}, per_rank={"position": 0})


def test_what_it_says_on_the_way(plain, tmp_path):
    told = []
    import_dcp(
        plain, tmp_path / "checkpoints", 1, progress=lambda done, total: told.append((done, total))
    )
    assert told == sorted(told)
    assert 400_000 < told[0][0] < told[-1][0] <= told[-1][1]


def test_a_flipped_bit_is_found_and_leaves_nothing(plain, tmp_path):
    data = plain / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'a' in __0_0.distcp is damaged: Bad CRC-32"):
        import_dcp(plain, tmp_path / "checkpoints", 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_has_no_checksum_is_taken_and_said(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        plain = stock_save(tmp_path / "plain", {"a": torch.arange(10.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert (
        "1 of 1 values have no checksum" in import_dcp(plain, tmp_path / "checkpoints", 1).unchecked
    )


def test_what_it_refuses(plain, tmp_path):
    folder = tmp_path / "checkpoints"
    path = import_dcp(plain, folder, 1).path
    with pytest.raises(BadUse, match="step-0000000001 already"):
        import_dcp(plain, folder, 1)
    with pytest.raises(BadUse, match="is already a checkpoint of Holdfast"):
        import_dcp(path, folder, 2)
    with Checkpointer(folder) as ckpt:
        own = ckpt.save(5, {"a": 1}).result()
    (own / "holdfast.json").unlink()
    with pytest.raises(BadUse, match="its manifest is missing: a save or a copy did not finish"):
        import_dcp(own, folder, 2)
    with pytest.raises(NotFound, match="is not a checkpoint"):
        import_dcp(tmp_path, folder, 2)
    (plain / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="is damaged"):
        import_dcp(plain, folder, 2)


@pytest.mark.parametrize("name", ["step-0000000004", "step-0000000004.replaced"])
def test_one_that_comes_while_it_copies_stays(plain, tmp_path, name):
    folder = tmp_path / "checkpoints"
    with Checkpointer(tmp_path / "another") as ckpt:
        theirs = ckpt.save(4, {"a": 4}).result()

    def progress(_done, _total):
        if theirs.exists():
            theirs.rename(folder / name)

    with pytest.raises(BadUse, match=f"{name} already"):
        import_dcp(plain, folder, 4, progress=progress)
    state = {"a": 0}
    assert Checkpointer(folder).restore(state) == state["a"] == 4


def import_for_ever(plain, into, report):
    for step in itertools.count(1):
        import_dcp(plain, into, step)
        os.write(report, b"%d\n" % step)


def test_killed_at_any_time_it_leaves_whole_checkpoints_alone(plain, tmp_path):
    folder, generator = tmp_path / "checkpoints", random.Random(20)
    for number in range(KILLS):
        into = folder / str(number)
        reading, report = os.pipe()
        importer = FORKS.Process(target=import_for_ever, args=(plain, into, report))
        importer.start()
        os.close(report)
        with os.fdopen(reading, "rb") as reports:
            first = reports.readline()
            time.sleep(generator.uniform(0, 0.1))
            importer.kill()
            there = [int(line) for line in (first, *reports)]
        importer.join()
        infos = scan(into)
        assert [verify(info).state for info in infos] == ["verified"] * len(infos)
        # The step whose report was due next may exist as well.
        assert {info.step for info in infos} - set(there) <= {there[-1] + 1}
        assert set(there) <= {info.step for info in infos}


def test_what_an_extension_of_pytorch_s_has_changed_is_refused_and_nothing_is_made(plain, tmp_path):
    metadata = read_dcp_metadata(plain)
    for stored in metadata.storage_data.values():
        stored.transform_descriptors = ["stream.zstd"]
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        BadUse, match=r"was written with an extension of PyTorch's, such as one that compresses"
    ):
        import_dcp(plain, tmp_path / "checkpoints", 1)
    assert not (tmp_path / "checkpoints").exists()
