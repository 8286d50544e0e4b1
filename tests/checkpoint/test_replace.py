"""`when_busy="replace"`: of the saves that are not durable, the one whose writing has not begun makes room."""

import contextlib
import logging
import os
import signal
import threading

import pytest
import torch
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.ipc.shared_buffer import State

MIB = 1 << 20


def large(value):
    """Three chunks, so that a limited rate holds the last of them back."""
    return {"large": torch.full((33 * MIB // 4,), float(value))}


@pytest.fixture
def ckpt(tmp_path):
    return Checkpointer(tmp_path, when_busy="replace", keep=None, max_write_mib_s=32)


def hold_the_writing_process(ckpt):
    """Stopped once it writes, so that no machine is too slow for what is to happen meanwhile."""
    (arena, *_) = ckpt._engine._writer._arenas.values()
    until(lambda: arena.state is State.WRITING)
    os.kill(ckpt._engine._writer.pid, signal.SIGSTOP)


@contextlib.contextmanager
def held_until(ckpt, condition):
    """In a call that waits for what is written, another thread has to let it go on."""
    hold_the_writing_process(ckpt)

    def go_on():
        until(condition)
        os.kill(ckpt._engine._writer.pid, signal.SIGCONT)

    going_on = threading.Thread(target=go_on)
    going_on.start()
    try:
        yield
    finally:
        going_on.join()


def test_the_save_that_waits_is_given_up_for_the_newer_one_and_the_one_being_written_is_not(
    tmp_path, ckpt, caplog
):
    with caplog.at_level(logging.WARNING, "holdfast"):
        handles = []
        for step in range(1, 6):
            handles.append(ckpt.save(step, large(step)))
            ckpt.before_update()  # is never waited for: there is room
            if step == 1:
                hold_the_writing_process(ckpt)
            assert not handles[0].done()
        os.kill(ckpt._engine._writer.pid, signal.SIGCONT)
        assert [handle.result(0) for handle in handles[1:4]] == [None] * 3
        assert [handle.result(ENDS_S).name[-1] for handle in (handles[0], handles[4])] == ["1", "5"]
    assert "Step 2 is given up for step 3: its writing has not begun." in caplog.text
    ckpt.save(6, large(6)).result(ENDS_S)  # the process that writes goes on
    assert [(info.step, verify(info).state) for info in scan(tmp_path)] == [
        (step, "verified") for step in (6, 5, 1)
    ]
    state = {"large": torch.zeros(33 * MIB // 4)}
    scan(tmp_path)[0].path.rename(tmp_path / "seen")
    assert Checkpointer(tmp_path).restore(state) == 5
    assert state["large"].eq(5).all()


def test_a_forced_save_is_not_given_up(tmp_path, ckpt):
    ckpt.save(1, large(1))
    ckpt.before_update()
    hold_the_writing_process(ckpt)
    forced = ckpt.save(2, large(2), force=True)
    ckpt.before_update()
    newer = ckpt.save(3, large(3))
    assert not forced.done()
    os.kill(ckpt._engine._writer.pid, signal.SIGCONT)
    assert [handle.result(ENDS_S).name[-1] for handle in (forced, newer)] == ["2", "3"]


def test_where_one_snapshot_is_all_there_is_room_for_the_save_waits(tmp_path):
    with Checkpointer(tmp_path, when_busy="replace", keep=None, max_memory_gib=0.05) as ckpt:
        handles = [ckpt.save(step, large(step)) for step in (1, 2, 3)]
    assert [handle.result(0).name[-1] for handle in handles] == ["1", "2", "3"]


def test_the_last_save_of_a_job_that_is_to_stop_takes_the_place_of_one_that_waits(
    tmp_path, ckpt, stop_at
):
    link = stop_at(3)
    handles = [ckpt.save(1, large(1))]
    with held_until(ckpt, lambda: len(handles) > 1 and handles[1].done()):
        handles.append(ckpt.save(2, large(2)))
        handles.append(ckpt.save(3, large(3)))
    assert link.left_at == 3
    assert handles[1].result(0) is None
    assert handles[2].result(0).name == "step-0000000003"


def test_a_state_of_another_shape_is_saved_all_the_same(tmp_path, ckpt):
    handles = [ckpt.save(1, large(1))]
    with held_until(ckpt, lambda: len(handles) > 1 and handles[1].done()):
        handles.append(ckpt.save(2, large(2)))
        other = ckpt.save(3, {"other": torch.ones(3)})
    assert handles[1].result(ENDS_S) is None
    assert other.result(ENDS_S)
    assert [info.step for info in scan(tmp_path)] == [3, 1]


def test_the_process_that_writes_may_die_after_a_save_was_given_up(tmp_path, ckpt):
    handles = [ckpt.save(1, large(1))]
    hold_the_writing_process(ckpt)
    handles += [ckpt.save(step, large(step)) for step in (2, 3)]
    ckpt.before_update()
    os.kill(ckpt._engine._writer.pid, signal.SIGKILL)
    assert [handle.result(ENDS_S) is None for handle in handles] == [False, True, False]
    assert [(info.step, verify(info).state) for info in scan(tmp_path)] == [
        (3, "verified"),
        (1, "verified"),
    ]
