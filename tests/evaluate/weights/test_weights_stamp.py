import os
import shutil

import msgspec
import pytest

from holdfast.evaluate.weights.describe import describe
from holdfast.evaluate.weights.stamp import SETTLED_AFTER_S, stamp_of


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def stamp(model, now_s=2e9):
    return stamp_of(describe(str(model)), now_s)


def test_reading_leaves_the_stamp_and_setting_the_time_back_does_not(model):
    before = stamp(model)
    weights = model / "model.safetensors"
    assert weights.read_bytes() == b"weights"
    assert stamp(model) == before
    seen = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert stamp(model).text != before.text


def test_a_copy_has_a_stamp_of_its_own(model):
    before = stamp(model)
    copy = model / "copy"
    copy.write_bytes(b"weights")
    copy.rename(model / "model.safetensors")
    assert stamp(model).text != before.text


def test_a_stamp_is_settled_when_its_newest_file_is_old(model):
    newest_s = max(file.stat().st_ctime for file in model.iterdir())
    assert not stamp(model, newest_s + SETTLED_AFTER_S / 2).is_settled
    assert stamp(model, newest_s + SETTLED_AFTER_S + 0.1).is_settled


def test_what_is_no_folder_here_has_no_stamp(model):
    shutil.copytree(model, model.parent / "whole")
    manifest = describe(str(model))
    (model / "model.safetensors").unlink()
    assert stamp_of(manifest, 2e9) is None
    there = msgspec.structs.replace(describe(str(model.parent / "whole")), source="s3://bucket/m")
    assert stamp_of(there, 2e9) is None


def test_a_stamp_is_of_opened_files_since_a_network_may_cache_what_stat_returns(model, monkeypatch):
    manifest, before = describe(str(model)), stamp(model)

    def cached(*_, **__):
        raise AssertionError("stat without open may be a minute old")

    monkeypatch.setattr(os, "stat", cached)
    assert stamp_of(manifest, 2e9) == before


def test_a_pipe_in_place_of_a_file_has_no_stamp_and_does_not_block(model):
    manifest = describe(str(model))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert stamp_of(manifest, 2e9) is None
