"""Test the files after a crash, on a full disk, and on a read-only disk."""

import errno
import fcntl
import json
import logging
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from started_ranks import run_program
from waiting import contents

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog import staging_dir
from holdfast.checkpoint.catalog.annotations import pin
from holdfast.core.errors import BadUse, CheckpointError, SaveFailed

HERE = Path(__file__).parent


def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path):
    """Real SIGKILLs of the trainer, the writing process, and both, at seeded instants of saves."""
    ended = run_program(HERE / "killed_saver.py", tmp_path / "checkpoints", 1, 12)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["kills"] == {"trainer": 4, "writer": 4, "both": 4}
    # The instants met saves halfway, and the surviving process completed its saves.
    assert found["unfinished"] >= 3, found
    assert found["saved_by_the_writer_alone"] >= 1, found
    assert found["saved_by_the_next_writer"] >= 4, found


def test_the_first_save_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    (tmp_path / ".step-0000000001.dead.tmp").mkdir()
    (tmp_path / ".deleting-step-0000000001.dead").mkdir()
    (tmp_path / ".deleting-step-0000000001.dead" / "file").write_text("")
    (tmp_path / ".step-0000000001.dead.failed").write_text("{}")
    alive = staging_dir.Staging(tmp_path, 2)
    Checkpointer(tmp_path).save(3, {}).result()
    assert sorted(path.name for path in contents(tmp_path)) == [alive.path.name, "step-0000000003"]
    alive.abandon()
    assert [path.name for path in contents(tmp_path)] == ["step-0000000003"]


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_save_begins_though_another_one_removes_leftovers_just_then(tmp_path, monkeypatch, call):
    """The folder of a new save looks left by a dead process until the folder is locked."""
    module = {"open": os, "flock": fcntl}[call]
    original, found = getattr(module, call), []

    def removed_before(*arguments):
        if not found:
            found.append(contents(tmp_path))
            monkeypatch.setattr(module, call, original)
            staging_dir.remove_leftovers(tmp_path)
            assert contents(tmp_path) == []
        return original(*arguments)

    monkeypatch.setattr(module, call, removed_before)
    save = staging_dir.Staging(tmp_path, 2)
    assert found == [contents(tmp_path)] == [[save.path]]
    staging_dir.remove_leftovers(tmp_path)
    assert contents(tmp_path) == [save.path], "it is locked"
    save.commit()
    assert [path.name for path in contents(tmp_path)] == ["step-0000000002"]


@pytest.fixture
def mounted(tmp_path):
    """Yield a tmpfs of 2 MiB, and a function that remounts the tmpfs with other options."""

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if os.geteuid() != 0 or not mount("size=2m"):
        pytest.skip("a small file system of its own needs root and the right to mount")
    yield tmp_path, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def big(value, count=100_000):
    return {"big": torch.full((count,), float(value)), "value": value}


def assert_step_1_is_intact(folder):
    state = big(0)
    assert Checkpointer(folder).restore(state) == 1
    assert state["big"].eq(1).all()
    assert [(info.step, verify(info).state) for info in scan(folder)] == [(1, "verified")]
    assert [path.name for path in contents(folder)] == ["step-0000000001"]


def test_a_full_disk_fails_in_one_clear_sentence_and_costs_no_earlier_checkpoint(mounted, link):
    folder, _remount = mounted
    ckpt = Checkpointer(folder)
    ckpt.save(1, big(1)).result()
    with pytest.raises(SaveFailed) as raised:
        ckpt.save(2, big(2, count=500_000)).result()
    message = str(raised.value)
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert message.startswith(f"Step 2 was not saved: {folder} is full: about 2,0")
    assert (
        f"and {free_bytes:,} are free. The last good step is 1 ({folder / 'step-0000000001'})."
        in message
    )
    assert message.endswith(
        "Free space there, keep fewer checkpoints, or give Checkpointer another folder."
    )
    assert "\n" not in message
    assert link.of("save_failed") == [{"step": 2, "reason": message, "errno": errno.ENOSPC}]
    assert_step_1_is_intact(folder)
    ckpt.save(2, big(2)).result()  # saved as soon as there is room


def is_durable(handle):
    try:
        return handle.result() is not None
    except SaveFailed:
        return False


def saved_while_full(folder, steps, **options):
    """Save steps of 600 KB each; return for each save whether it became durable."""
    with Checkpointer(folder, **options) as ckpt:
        handles = [ckpt.save(step, big(step, count=150_000)) for step in range(1, steps + 1)]
        return [is_durable(handle) for handle in handles]


def test_on_a_full_disk_the_oldest_that_may_go_makes_room_for_the_save(small_disk, link):
    """There is room for four. Two are always there: the newest, and the one being written."""
    with Checkpointer(small_disk, keep=10) as ckpt:
        ckpt.save(0, big(0, count=150_000)).result()
        pin(small_disk / "step-0000000000", by="test", now_s=0.0)
    assert saved_while_full(small_disk, 8, keep=10) == [True] * 8
    assert [(info.step, verify(info).state) for info in scan(small_disk)] == [
        (step, "verified") for step in (8, 7, 6, 0)
    ]
    assert [(Path(event["deleted"]).name, event["folder"]) for event in link.of("disk_full")] == [
        (f"step-{step:010d}", str(small_disk)) for step in range(1, 6)
    ]


def test_on_a_full_disk_of_which_nothing_may_go_training_goes_on_and_the_next_call_tries_again(
    small_disk, link
):
    assert saved_while_full(small_disk, 6, keep=None) == [True] * 4 + [False] * 2
    assert [(event["step"], event["errno"]) for event in link.of("save_failed")] == [
        (5, errno.ENOSPC),
        (6, errno.ENOSPC),
    ]
    assert not link.of("disk_full")
    with Checkpointer(small_disk, every=100, keep=None) as ckpt:
        assert not is_durable(ckpt.save(100, big(100, count=150_000)))
        shutil.rmtree(small_disk / "step-0000000001")
        assert ckpt.save(101, big(101, count=150_000)).result() == small_disk / "step-0000000101"


def test_on_a_full_disk_nothing_goes_where_the_newest_does_not_verify(small_disk, link):
    assert saved_while_full(small_disk, 4, keep=4) == [True] * 4
    (data,) = (small_disk / "step-0000000004").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-1000] ^= 1
    data.write_bytes(content)
    assert saved_while_full(small_disk, 1, keep=4) == [False]
    assert [info.step for info in scan(small_disk)] == [4, 3, 2, 1]
    assert not link.of("disk_full")


@pytest.mark.parametrize("seed", range(8))
def test_a_disk_that_fills_at_any_byte_is_never_a_success(mounted, seed):
    """The room ends within the data, the digests, the metadata or the manifest, or suffices."""
    folder, _remount = mounted
    ckpt = Checkpointer(folder)
    ckpt.save(1, big(1)).result()
    filling = folder / "filling"
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    left_bytes = random.Random(seed).choice(
        [4096 * pages for pages in (1, 50, 98, 99, 100, 101, 102, 103, 104)]
    )
    filling.write_bytes(bytes(free_bytes - left_bytes))
    try:
        ckpt.save(2, big(2)).result()
    except SaveFailed as error:
        assert "is full" in str(error)  # noqa: PT017 - either way is right, if it is true
        filling.unlink()
        assert_step_1_is_intact(folder)
    else:
        state = big(0)
        assert ckpt.restore(state) == 2
        assert state["big"].eq(2).all()


def test_a_read_only_disk_fails_in_one_clear_sentence(mounted):
    folder, remount = mounted
    ckpt = Checkpointer(folder)
    ckpt.save(1, big(1)).result()
    assert remount("ro")
    with pytest.raises(
        SaveFailed, match=r"Step 2 was not saved: .* cannot be written .*Make it writable, or"
    ):
        ckpt.save(2, big(2)).result()
    with pytest.raises(BadUse, match=r"cannot be written \(Read-only file system\)"):
        Checkpointer(folder)
    with Checkpointer(folder, read_only=True) as reading:
        state = big(0)
        assert reading.restore(state) == 1
        assert state["big"].eq(1).all()
    assert remount("rw")
    assert_step_1_is_intact(folder)


@pytest.fixture
def failing(mounted):
    """Yield a folder on a nearly full disk: a test file fits, but the first save fails."""
    folder, _remount = mounted
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (folder / "filling").write_bytes(bytes(free_bytes - 8192))
    yield folder
    assert [path.name for path in contents(folder)] == ["filling"]


def test_a_failed_save_raises(failing):
    with pytest.raises(
        SaveFailed, match=r"Step 1 was not saved: .* is full: .* There is no earlier checkpoint\."
    ):
        Checkpointer(failing).save(1, big(1)).result()


def test_with_warn_training_goes_on_and_the_handle_tells(failing, caplog, link):
    ckpt = Checkpointer(failing, on_failure="warn")
    with caplog.at_level(logging.WARNING, "holdfast"):
        handle = ckpt.save(1, big(1))
        ckpt.wait()
    assert handle.done()
    with pytest.raises(SaveFailed, match="is full"):
        handle.result()
    assert "is full" in caplog.text
    assert [event["step"] for event in link.of("save_failed")] == [1]


def test_a_job_does_not_leave_as_if_safe_when_its_last_save_fails(failing, stop_at):
    link = stop_at(1)
    with pytest.raises(SaveFailed):
        Checkpointer(failing, on_failure="warn").save(1, big(1))
    assert link.left_at is None


def test_a_plain_value_that_this_pytorch_would_not_read_back_fails_the_save(tmp_path, monkeypatch):
    from holdfast.checkpoint.state import tree

    monkeypatch.setattr(tree, "_INT_BITS", 10_000)
    ckpt = Checkpointer(tmp_path, on_failure="warn")
    with pytest.raises(CheckpointError, match="'n' is not a plain value"):
        ckpt.save(1, {"n": 1 << 5000}).result()
    assert contents(tmp_path) == []
    ckpt.save(2, {"n": 1}).result()
    assert [path.name for path in contents(tmp_path)] == ["step-0000000002"]
