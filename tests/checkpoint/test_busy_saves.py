"""Show what happens to saves that come faster than the storage writes."""

import logging
import os
import signal

from overlapping_saves import large, restored, slow, steps_in, writing_stopped
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, scan, verify


def test_skip_leaves_out_the_third_save_in_flight_and_takes_the_next_that_finds_room(
    tmp_path, caplog
):
    ckpt = Checkpointer(tmp_path, when_busy="skip", keep=None)
    with writing_stopped(ckpt), caplog.at_level(logging.WARNING, "holdfast"):
        handles = [ckpt.save(step, large(step)) for step in (1, 2, 3)]
        assert handles[2].result(ENDS_S) is None
        assert "Step 3 is not saved: the saves before it are not durable yet." in caplog.text
        assert not handles[1].done()
    assert all(handle.result(ENDS_S) for handle in handles[:2])
    ckpt.save(4, large(4)).result(ENDS_S)
    assert sorted(steps_in(tmp_path)) == [1, 2, 4]


def test_wait_makes_the_update_wait_and_leaves_nothing_out(tmp_path):
    ckpt = slow(tmp_path, 0.3, keep=None)
    handles = [ckpt.save(step, large(step)) for step in (1, 2, 3)]
    ckpt.before_update()
    assert 1 in steps_in(tmp_path)  # the handle completes a moment after its memory is free
    ckpt.close()
    assert [handle.result(0).name[-1] for handle in handles] == ["1", "2", "3"]
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 3


def test_a_job_that_is_to_stop_never_leaves_with_its_last_save_skipped(tmp_path, stop_at):
    link = stop_at(3)
    ckpt = slow(tmp_path, 0.5, when_busy="skip", keep=None)
    for step in (1, 2, 3):
        ckpt.save(step, large(step))
    assert link.left_at == 3
    assert 3 in steps_in(tmp_path)


def test_a_writing_process_that_is_killed_in_a_save_costs_nothing(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=None)
    ckpt.save(1, large(1)).result(ENDS_S)
    writer = ckpt._engine._writer
    writer._max_write_bytes_s = 1.0  # so that the second chunk is never written
    handle = ckpt.save(2, large(2))
    until(lambda: list(tmp_path.glob(".step-0000000002.*.tmp/*.distcp")))
    writer._max_write_bytes_s = None
    os.kill(writer.pid, signal.SIGKILL)
    handle.result(ENDS_S)
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 2
    found = restored(tmp_path, large(0))
    assert found["value"] == 2
    assert found["large"].eq(2).all()
