"""Show which calls of save make a checkpoint: a due one, a forced one, and the last one before a stop."""

import shutil

import pytest
import torch
from overlapping_saves import writing_stopped
from waiting import contents

from holdfast.checkpoint import Checkpointer, scan
from holdfast.core.errors import BadUse, SaveFailed


def test_nothing_is_done_and_the_callable_not_called_unless_due(tmp_path):
    ckpt = Checkpointer(tmp_path, every=10)
    handle = ckpt.save(9, lambda: pytest.fail("called"))
    assert (handle.step, handle.done(), handle.result(0)) == (None, True, None)
    assert contents(tmp_path) == []
    handle = ckpt.save(10, lambda: {"a": 1})
    assert (handle.step, handle.result(10)) == (10, tmp_path / "step-0000000010")


def test_a_stop_saves_whatever_is_due_and_leaves(tmp_path, stop_at):
    link = stop_at(7)
    ckpt = Checkpointer(tmp_path, every=100)
    assert ckpt.save(6, {"a": 6}).step is None
    assert link.left_at is None
    ckpt.save(7, {"a": 7}).result()
    assert link.left_at == 7
    state = {"a": 0}
    assert ckpt.restore(state) == 7


def test_a_due_step_between_a_restored_one_and_the_next_is_made_up_for(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(95, {"a": 95}).result()
    with Checkpointer(tmp_path, every=100) as ckpt:
        ckpt.restore({"a": 0})
        assert ckpt.save(103, {"a": 103}).step == 103


def test_a_forced_save_is_made_whatever_every_says_and_once(tmp_path):
    with Checkpointer(tmp_path, every=100, keep=None) as ckpt:

        def forced(step):
            handle = ckpt.save(step, {"a": step}, force=True)
            assert handle.result() == tmp_path / f"step-{step:010d}"
            return handle.step

        assert ckpt.save(7, {"a": 7}).step is None
        assert (forced(8), forced(8)) == (8, None)
        assert ckpt.save(100, {"a": 100}).step == 100
        assert forced(100) is None
        assert ckpt.restore({"a": 0}) == 100
        assert ckpt.save(50, {"a": 50}).step is None  # training has gone back
        assert forced(100) == 100
    assert [info.step for info in scan(tmp_path)] == [100, 8]
    with Checkpointer(tmp_path, every=100) as ckpt:
        ckpt.restore({"a": 0})
        handle = ckpt.save(100, {"a": 100}, force=True)
        assert (handle.step, handle.result()) == (None, tmp_path / "step-0000000100")
        assert ckpt.save(101, {"a": 101}, force=True).step == 101


@pytest.mark.parametrize("on_failure", ["warn", "retry"])
def test_a_forced_save_that_failed_is_made_again_by_another_one(tmp_path, on_failure):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, on_failure=on_failure) as ckpt:
        with pytest.raises(BadUse, match="Cannot save"):
            ckpt.save(1, {"a": object()}, force=True)
        assert ckpt.save(1, {"a": 1}, force=True).result().name == "step-0000000001"
        folder.rename(tmp_path / "away")
        with pytest.raises(SaveFailed):
            ckpt.save(2, {"a": 2}, force=True).result()
        (tmp_path / "away").rename(folder)
        assert ckpt.save(2, {"a": 2}, force=True).result().name == "step-0000000002"


def test_a_forced_save_of_a_step_that_was_restored_over_is_made(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (5, 10):
            ckpt.save(step, {"a": step}).result()
        ckpt.wait()
        shutil.rmtree(tmp_path / "step-0000000010")
        assert ckpt.restore({"a": 0}) == 5
        assert ckpt.save(10, {"a": 11}, force=True).step == 10


def test_a_forced_save_is_not_left_out_nor_is_one_that_was(tmp_path):
    tensor = torch.ones(9 << 20)
    with Checkpointer(tmp_path, when_busy="skip", keep=None) as ckpt:
        with writing_stopped(ckpt):
            for step in range(4):
                ckpt.before_update()
                last = ckpt.save(step, {"t": tensor})
            assert last.result() is None, "no save is durable yet"
        assert ckpt.save(3, {"t": tensor}, force=True).result() == tmp_path / "step-0000000003"
