"""Show that saves fail in one sentence, or are made, where memory or file descriptors are scarce."""

import os
import resource
import signal

import pytest
import torch

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.core.errors import SaveFailed


def test_too_little_memory_for_one_snapshot_is_one_sentence(tmp_path):
    ckpt = Checkpointer(tmp_path, max_memory_gib=1 / 1024, on_failure="raise")
    with pytest.raises(
        SaveFailed,
        match=r"A snapshot needs 4,\d{3},\d{3} bytes of memory, and max_memory_gib allows 1,048,",
    ):
        ckpt.save(1, {"t": torch.ones(1 << 20)})
    assert ckpt.save(2, {"t": torch.ones(1 << 10)}).result()


def test_too_little_memory_for_two_snapshots_is_enough_for_one_after_the_other(tmp_path, caplog):
    with Checkpointer(tmp_path, max_memory_gib=6 / 1024, keep=None) as ckpt:
        for step in range(4):
            ckpt.save(step, {"t": torch.full((1 << 20,), float(step))})
            assert len(ckpt._engine._seats._seats) <= 1
            ckpt.before_update()
    assert caplog.text.count("max_memory_gib allows one snapshot of 4,") == 1
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 4


def test_a_node_short_of_memory_fails_the_save_and_no_training_that_is_only_to_be_warned(
    tmp_path, monkeypatch, link
):
    monkeypatch.setattr(memory_reservation, "available_memory_bytes", lambda: 0)
    with Checkpointer(tmp_path, on_failure="warn") as ckpt:
        with pytest.raises(
            SaveFailed, match=r"Step 1 was not saved: A snapshot needs .* of memory, and 0 are free"
        ):
            ckpt.save(1, {"t": torch.ones(3)}).result()
        monkeypatch.undo()
        ckpt.save(2, {"t": torch.ones(3)}).result()
    assert [info.step for info in scan(tmp_path)] == [2]


def test_a_trainer_with_very_many_open_files_saves(tmp_path):
    """For example a trainer that maps thousands of data files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1200  # select(2) accepts 1,024
    if most < 2 * many:
        pytest.skip(f"this process may have {most} files open at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2 * many), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(many)]
    try:
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"t": torch.ones(3)}).result(30)
            os.kill(ckpt._engine._writer.pid, signal.SIGKILL)
            ckpt.save(2, {"t": torch.ones(3)}).result(30)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert [info.step for info in scan(tmp_path)] == [2, 1]
