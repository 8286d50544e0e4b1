"""Test a Checkpointer that is never closed: dropped, in a cycle, replaced, or sent to a process."""

import copy
import gc
import logging
import os
import pickle
import signal
import threading
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from test_forked import in_a_child
from waiting import until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.core.errors import BadUse


def state_of(step):
    return {"t": torch.full((100_000,), float(step))}


def arenas():
    """Return the arenas of this process; each has two descriptors, its own and the map's."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "holdfast-arena" in str(fd.readlink()):
                found.add(fd.stat().st_ino)
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found


def at_work():
    """Return the arenas and threads of Checkpointers, maybe also of an earlier test."""
    names = ("holdfast-stage", "holdfast-cl")
    return arenas() | {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def assert_nothing_is_left(before, pid, *dropped):
    assert [each() for each in dropped] == [None] * len(dropped)
    until(lambda: not psutil.pid_exists(pid))
    assert not at_work() - before


@pytest.mark.parametrize("every", [1, "auto"])
def test_one_that_is_dropped_is_closed_with_its_last_save_safe(tmp_path, every):
    before, ckpt = at_work(), Checkpointer(tmp_path, every=every)
    ckpt.save(1, state_of(1), force=True)
    pid, dropped = ckpt._engine._writer.pid, weakref.ref(ckpt)
    del ckpt
    assert_nothing_is_left(before, pid, dropped)
    assert verify(tmp_path / "step-0000000001").state == "verified"


def test_a_cell_that_is_run_again_and_again_has_one_process_and_its_memory(tmp_path):
    before, ckpt, pids, made = at_work(), None, [], []
    for step in (1, 2, 3):
        ckpt = Checkpointer(tmp_path)
        ckpt.save(step, state_of(step)).result()
        pids.append(ckpt._engine._writer.pid)
        made.append(weakref.ref(ckpt))
    until(lambda: [psutil.pid_exists(pid) for pid in pids] == [False, False, True])
    assert len(arenas() - before) <= 2
    del ckpt
    assert_nothing_is_left(before, pids[-1], *made)
    assert [info.step for info in scan(tmp_path)] == [3, 2, 1]


@pytest.mark.parametrize("name", ["MainThread", "holdfast-stage_0"])
def test_one_in_a_cycle_is_closed_by_whatever_thread_collects_it(tmp_path, name):
    before, holder = at_work(), [Checkpointer(tmp_path, sigterm_grace_s=5)]
    handler = signal.getsignal(signal.SIGTERM)
    holder.append(holder)
    holder[0].save(1, state_of(1))
    pid, dropped = holder[0]._engine._writer.pid, weakref.ref(holder[0])
    del holder
    if name == "MainThread":
        gc.collect()
        assert signal.getsignal(signal.SIGTERM) != handler
    else:
        collecting = threading.Thread(target=gc.collect, name=name)
        collecting.start()
        collecting.join()
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "holdfast-close"]
    )
    assert_nothing_is_left(before, pid, dropped)
    assert [info.step for info in scan(tmp_path)] == [1]


def test_one_that_failed_is_dropped_and_it_is_logged(tmp_path, caplog):
    ckpt = Checkpointer(tmp_path / "run")
    ckpt.save(1, state_of(1)).result()
    os.kill(ckpt._engine._writer.pid, signal.SIGSTOP)
    ckpt.save(2, state_of(2))
    (tmp_path / "run").rename(tmp_path / "away")
    os.kill(ckpt._engine._writer.pid, signal.SIGCONT)
    del ckpt
    assert any("Step 2 was not saved" in record.getMessage() for record in caplog.records)


def test_what_the_trainer_has_is_not_closed_by_a_child_that_drops_it(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state_of(1)).result()

    def drop():
        nonlocal ckpt
        del ckpt
        gc.collect()

    in_a_child(drop)
    ckpt.save(2, state_of(2)).result()
    ckpt.close()
    assert [info.step for info in scan(tmp_path)] == [2, 1]


def test_a_newer_one_takes_over_the_folder_and_says_so_once(tmp_path, caplog):
    older, newer = Checkpointer(tmp_path), Checkpointer(tmp_path / ".." / tmp_path.name)
    handle = older.save(1, state_of(1))
    pid = older._engine._writer.pid
    for step in (2, 3):
        newer.save(step, state_of(step)).result()
    assert handle.result() == tmp_path / "step-0000000001"
    until(lambda: not psutil.pid_exists(pid))
    said = [record for record in caplog.records if "takes over" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    with pytest.raises(BadUse, match="Another Checkpointer of this process has taken over"):
        older.save(4, state_of(4))
    older.close()
    newer.close()
    assert [info.step for info in scan(tmp_path)] == [3, 2, 1]


def test_one_that_only_restores_takes_over_nothing(tmp_path, caplog):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result()
        state = state_of(0)
        assert Checkpointer(tmp_path).restore(state) == 1
        ckpt.save(2, state_of(2)).result()
    assert not [record for record in caplog.records if "takes over" in record.getMessage()]


def test_neither_it_nor_a_handle_goes_to_another_process(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, state_of(1))
        for sent in (ckpt, handle, {"dataset": [ckpt]}):
            with pytest.raises(
                BadUse, match=r"A (Checkpointer|SaveHandle) cannot be pickled .* worker_init_fn"
            ):
                pickle.dumps(sent)
        with pytest.raises(BadUse, match="cannot be pickled or copied"):
            copy.deepcopy(ckpt)
