"""Test one writer a folder: two jobs, killed holders, newer attempts, other runs' checkpoints."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from images import hand_made, order_of
from waiting import contents, until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog import writer_lease
from holdfast.checkpoint.catalog.staging_dir import Staging
from holdfast.checkpoint.catalog.writer_lease import WRITER_NAME, Identity, acquire, read_holder
from holdfast.checkpoint.writer import process as writing_process
from holdfast.core.errors import BadUse, SaveFailed, StateMismatch
from holdfast.core.link import ENV_ATTEMPT, ENV_FRESH, ENV_RUN

HOLD = """
import sys, time
from pathlib import Path
from holdfast.checkpoint.catalog.writer_lease import Identity, acquire
run, generation = sys.argv[2], int(sys.argv[3]) or None
held = acquire(Path(sys.argv[1]), Identity(run=run, generation=generation), now_s=1.0)
print(held.holder.token, flush=True)
time.sleep(600)
"""


def state_of(value):
    return {"w": torch.full((4,), float(value))}


@pytest.fixture
def other(tmp_path):
    """Yield a function that starts another process which holds the folder."""
    started = []

    def start(run="", generation=0):
        command = [sys.executable, "-c", HOLD, str(tmp_path), run, str(generation)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(writer_lease, "PATIENCE_S", 0.2)


@pytest.fixture
def supervised(monkeypatch):
    def of(run, attempt):
        monkeypatch.setenv(ENV_RUN, run)
        monkeypatch.setenv(ENV_ATTEMPT, str(attempt))

    return of


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("theirs", "ours"), [("", None), ("", "b"), ("a", None), ("a", "a"), ("a", "b")]
)
def test_a_second_job_is_refused_and_the_first_named(tmp_path, other, theirs, ours):
    process = other(theirs)
    ckpt = Checkpointer(tmp_path, run=ours)
    named = rf"Another process saves into .* \(.*process {process.pid} on .*, since 1970.*read_only=True"
    with pytest.raises(BadUse, match=named):
        ckpt.save(1, state_of(1))
    with pytest.raises(BadUse, match=named):
        ckpt.restore(state_of(0))
    assert scan(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_whoever_only_reads_is_not_refused(tmp_path, other):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result()
    other()
    assert Checkpointer(tmp_path, read_only=True).restore(state_of(0)) == 1
    assert verify(tmp_path / "step-0000000001").state == "verified"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_dies_lets_go(tmp_path, other, number):
    process = other("a")
    process.send_signal(number)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, state_of(1)).result()
    assert read_holder(tmp_path).pid == os.getpid()


def test_a_holder_that_is_ending_is_waited_for(tmp_path, other):
    process = other()
    ending = threading.Timer(0.5, process.kill)
    ending.start()
    assert acquire(tmp_path, Identity(), now_s=1.0).holder.pid == os.getpid()
    ending.join()


def test_a_child_of_a_dead_trainer_holds_nothing(tmp_path):
    """For example a data worker that outlives the trainer."""
    code = HOLD.replace(
        "time.sleep(600)",
        "import os\nchild = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "", "0"], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        assert psutil.pid_exists(child)
        assert acquire(tmp_path, Identity(), now_s=2.0).holder.since_s == 2.0
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.usefixtures("impatient")
def test_a_newer_attempt_takes_over_from_one_that_hangs_and_fences_it(tmp_path, other, supervised):
    process = other("a", generation=1)
    process.send_signal(signal.SIGSTOP)
    supervised("a", 2)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, state_of(1)).result()
        assert read_holder(tmp_path).generation == 2
    supervised("a", 1)
    with Checkpointer(tmp_path) as ckpt:  # after the end of the newer one, any may
        assert ckpt.save(2, state_of(2)).result()


@pytest.mark.usefixtures("impatient")
def test_an_older_attempt_is_refused_by_a_newer_one(tmp_path, other, supervised):
    other("a", generation=3)
    supervised("a", 2)
    with pytest.raises(BadUse, match=r"run 'a', attempt 3, process"):
        Checkpointer(tmp_path).save(1, state_of(1))


def test_a_writer_that_comes_back_after_another_has_taken_over_saves_nothing_more(
    tmp_path, supervised
):
    supervised("a", 1)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state_of(1)).result()
    (tmp_path / WRITER_NAME).write_text(
        json.dumps(
            {"run": "a", "generation": 2, "host": "h", "pid": 9, "since_s": 1.0, "token": "other"}
        )
    )
    with pytest.raises(
        SaveFailed,
        match=r"Step 2 was not saved: .* taken over by run 'a', attempt 2, process 9 on h",
    ):
        ckpt.save(2, state_of(2)).result()
    assert [info.step for info in scan(tmp_path)] == [1]
    assert not list(tmp_path.glob(".step-*"))


def test_the_last_save_of_a_dead_trainer_is_waited_for(tmp_path, monkeypatch):
    holder = acquire(tmp_path, Identity(), now_s=1.0)
    holder.release()
    staging = tmp_path / ".step-0000000001.abcd-1.tmp"
    staging.mkdir()
    fd = os.open(staging, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    seen = []

    def waits(_seconds):
        seen.append(read_holder(tmp_path).since_s)
        staging.rename(tmp_path / "step-0000000001")

    monkeypatch.setattr(time, "sleep", waits)
    acquire(tmp_path, Identity(), now_s=2.0)
    os.close(fd)
    assert seen == [1.0]  # not fenced before its end


class FakeTime:
    """A clock that moves by 1 s a sleep, and calls `at_each` with the seconds so far."""

    def __init__(self, at_each):
        self.now_s, self._at_each = 0.0, at_each

    def monotonic(self):
        return self.now_s

    def sleep(self, _seconds):
        self.now_s += 1.0
        self._at_each(self.now_s)


@pytest.fixture
def unfinished(tmp_path):
    """Yield the last save of a dead trainer, which its writing process still writes."""
    acquire(tmp_path, Identity(run="a"), now_s=1.0).release()
    staging = Staging(tmp_path, 2, "abcd-1")
    (staging.path / "__0_0.distcp").touch()
    yield staging
    if staging.path.exists():
        staging.abandon()


def test_the_last_save_of_a_dead_trainer_is_waited_for_while_it_makes_progress(
    tmp_path, monkeypatch, caplog, unfinished
):
    def write(now_s):
        with (unfinished.path / "__0_0.distcp").open("ab") as file:
            file.write(b"x")
        if now_s == 90.0:
            unfinished.commit()

    fake = FakeTime(write)
    monkeypatch.setattr(writer_lease, "time", fake)
    acquire(tmp_path, Identity(run="a"), now_s=2.0).release()
    assert (fake.now_s, unfinished.path.exists()) == (90.0, False)
    assert caplog.text.count("Waiting for the last save of run 'a', attempt 1, process") == 1


@pytest.mark.parametrize(
    ("progresses", "timeout_s", "waits_s"), [(False, 600.0, 10.0), (True, 35.0, 35.0)]
)
def test_a_last_save_that_makes_none_or_never_ends_is_not_waited_for(
    tmp_path, monkeypatch, caplog, unfinished, progresses, timeout_s, waits_s
):
    fake = FakeTime(
        lambda now_s: progresses and os.utime(unfinished.path / "__0_0.distcp", (now_s, now_s))
    )
    monkeypatch.setattr(writer_lease, "time", fake)
    acquire(tmp_path, Identity(run="a"), now_s=2.0, timeout_s=timeout_s).release()
    assert fake.now_s == waits_s
    assert "Stopped waiting for the last save" in caplog.text
    assert unfinished.path.exists()


def test_a_checkpointer_gives_the_last_save_of_another_its_own_time(
    tmp_path, monkeypatch, unfinished
):
    fake = FakeTime(lambda now_s: os.utime(unfinished.path / "__0_0.distcp", (now_s, now_s)))
    monkeypatch.setattr(writer_lease, "time", fake)
    with Checkpointer(tmp_path, timeout_s=15.0) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
    assert fake.now_s == 15.0


@pytest.mark.parametrize(("host", "waits_s"), [("far", 120.0), (socket.gethostname(), 10.0)])
@pytest.mark.parametrize("ours", ["a", ""])
def test_a_writer_on_another_node_has_as_long_as_its_server_may_hold_its_locks(
    tmp_path, monkeypatch, caplog, host, waits_s, ours
):
    holder = {"run": "a", "generation": 1, "host": host, "pid": 9, "since_s": 1.0, "token": "other"}
    (tmp_path / WRITER_NAME).write_text(json.dumps(holder))
    with (tmp_path / WRITER_NAME).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fake = FakeTime(lambda _: None)
        monkeypatch.setattr(writer_lease, "time", fake)
        with pytest.raises(BadUse, match=f"Another process saves into .*process 9 on {host}"):
            acquire(tmp_path, Identity(run=ours), now_s=2.0)
        assert fake.now_s == waits_s
        assert (
            caplog.text.count(f"Waiting for the end of run 'a', attempt 1, process 9 on {host}")
            == 1
        )
        fake.now_s = 0.0
        with pytest.raises(BadUse, match="Another process saves into"):
            acquire(tmp_path, Identity(run="b"), now_s=2.0)
        assert fake.now_s == 0.0
        fake._at_each = lambda now_s: now_s == 90.0 and fcntl.flock(held, fcntl.LOCK_UN)
        if host == "far":
            assert acquire(tmp_path, Identity(run=ours), now_s=2.0).holder.run == "a"
            assert fake.now_s == 90.0


def test_checkpoints_of_another_run_are_refused_with_the_ways_out(tmp_path, supervised):
    with Checkpointer(tmp_path, run="old") as ckpt:
        ckpt.save(1, state_of(1)).result()
    supervised("new", 1)
    with pytest.raises(
        BadUse,
        match=r"another run \(run 'old', .*this is run 'new'.*--resume old.*fresh=True.*--fresh",
    ):
        Checkpointer(tmp_path).restore(state_of(0))
    assert [info.step for info in scan(tmp_path)] == [1]
    (tmp_path / WRITER_NAME).unlink()  # the last resort
    assert Checkpointer(tmp_path).restore(state_of(0)) == 1


@pytest.mark.parametrize(("theirs", "ours"), [("a", "a"), ("a", None), (None, "a"), (None, None)])
def test_without_two_names_the_newest_is_gone_on_from(tmp_path, theirs, ours):
    with Checkpointer(tmp_path, run=theirs) as ckpt:
        ckpt.save(1, state_of(1)).result()
    with Checkpointer(tmp_path, run=ours) as ckpt:
        assert ckpt.restore(state_of(0)) == 1


def test_a_state_that_does_not_fit_is_refused_with_the_ways_out(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result()
    with pytest.raises(
        StateMismatch,
        match="give this job another folder, or set the checkpoints aside with fresh=True",
    ):
        Checkpointer(tmp_path).restore({"w": torch.zeros(5)})


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_fresh_run_sets_the_old_aside_and_its_restart_does_not(tmp_path, monkeypatch, how):
    with Checkpointer(tmp_path, run="old", keep=None) as ckpt:
        for step in (1, 3000):
            ckpt.save(step, state_of(step)).result()
    if how == "environment":
        monkeypatch.setenv(ENV_FRESH, "1")
    options = {"run": "new", "fresh": how == "argument"}
    with Checkpointer(tmp_path, **options) as ckpt:
        assert not ckpt.has_any()
        assert ckpt.restore(state_of(0)) == 0
        ckpt.save(2, state_of(2)).result()
    assert [info.step for info in scan(tmp_path / "aside-1")] == [3000, 1]
    assert {verify(info).state for info in scan(tmp_path / "aside-1")} == {"verified"}
    with Checkpointer(tmp_path, **options) as ckpt:
        assert ckpt.has_any()
        assert ckpt.restore(state_of(0)) == 2
    assert sorted(path.name for path in contents(tmp_path)) == ["aside-1", "step-0000000002"]


def test_fresh_without_a_name_sets_aside_each_time(tmp_path):
    for number in (1, 2, 3):
        with Checkpointer(tmp_path, fresh=True) as ckpt:
            assert ckpt.restore(state_of(0)) == 0
            ckpt.save(number, state_of(number)).result()
            ckpt.save(number + 1, state_of(number)).result()
    assert [len(scan(tmp_path / name)) for name in ("aside-1", "aside-2")] == [2, 2]
    assert [info.step for info in scan(tmp_path)] == [4, 3]


@pytest.mark.parametrize("between", ["without a name", "without a file"])
def test_a_fresh_run_goes_on_from_its_own_whatever_was_there_between(tmp_path, between):
    options = {"run": "new", "fresh": True}
    with Checkpointer(tmp_path, **options) as ckpt:
        ckpt.save(10, state_of(10)).result()
    if between == "without a name":
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.restore(state_of(0)) == 10
        assert read_holder(tmp_path).run == "new"
    else:
        (tmp_path / WRITER_NAME).unlink()
    with Checkpointer(tmp_path, **options) as ckpt:
        assert ckpt.has_any()
        assert ckpt.restore(state_of(0)) == 10
    assert not list(tmp_path.glob("aside-*"))


def test_a_fresh_run_takes_the_newest_checkpoint_for_its_own_not_an_older_one(tmp_path):
    for run, step in (("new", 10), ("old", 20)):
        with Checkpointer(tmp_path, run=run) as ckpt:
            if run == "old":
                (tmp_path / WRITER_NAME).unlink()
            ckpt.save(step, state_of(step)).result()
    (tmp_path / WRITER_NAME).unlink()
    with Checkpointer(tmp_path, run="new", fresh=True) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
    assert [info.step for info in scan(tmp_path / "aside-1")] == [20, 10]


def test_a_process_without_a_name_does_not_open_the_folder_to_another_run(tmp_path):
    with Checkpointer(tmp_path, run="a") as ckpt:
        ckpt.save(100, state_of(100)).result()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state_of(0)) == 100
    with pytest.raises(BadUse, match=r"another run \(run 'a'.*this is run 'b'"):
        Checkpointer(tmp_path, run="b").restore(state_of(0))
    with Checkpointer(tmp_path, fresh=True) as ckpt:  # the set-aside folder names no run any more
        ckpt.save(1, state_of(1)).result()
    assert Checkpointer(tmp_path, run="b").restore(state_of(0)) == 1


@pytest.mark.parametrize("cannot", ["move a checkpoint", "read who saves"])
def test_a_fresh_run_that_cannot_set_the_old_aside_is_refused(tmp_path, monkeypatch, cannot):
    with Checkpointer(tmp_path, run="old") as ckpt:
        ckpt.save(3000, state_of(3000)).result()
    real = os.open

    def rename(path, _target):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def open_file(path, *arguments, **named):
        if str(path).endswith(WRITER_NAME):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    with monkeypatch.context() as patch:
        if cannot == "move a checkpoint":
            patch.setattr(Path, "rename", rename)
        else:
            patch.setattr(os, "open", open_file)
        named = "step-0000003000" if cannot == "move a checkpoint" else WRITER_NAME
        with pytest.raises(
            BadUse,
            match=rf"could not be set aside: .*Permission denied: '.*{named}.*another folder",
        ):
            Checkpointer(tmp_path, run="new", fresh=True).restore(state_of(0))
    assert [info.step for info in scan(tmp_path)] == [3000]


@pytest.mark.parametrize("older_has", ["saved", "begun to save", "restored"])
def test_fresh_sets_aside_what_an_older_one_of_the_same_process_has(tmp_path, older_has):
    """A cell of a notebook may run again while the name is bound to the older Checkpointer."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(90, state_of(90)).result()
    older = Checkpointer(tmp_path)
    if older_has == "restored":
        assert older.restore(state_of(0)) == 90
    else:
        handle = older.save(100, state_of(100))
        if older_has == "saved":
            handle.result()
    with Checkpointer(tmp_path, fresh=True) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
        ckpt.save(1, state_of(1)).result()
        with pytest.raises((BadUse, SaveFailed), match="taken over"):
            older.save(110, state_of(110)).result()
    assert [info.step for info in scan(tmp_path / "aside-1")] == (
        [90] if older_has == "restored" else [100, 90]
    )
    assert [info.step for info in scan(tmp_path)] == [1]
    older.close()


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_setting_aside_that_was_cut_off_is_finished_by_the_next(tmp_path, moved):
    with Checkpointer(tmp_path, run="old", keep=None) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    hidden = tmp_path / ".aside-1.tmp"
    hidden.mkdir()
    for name in ["step-0000000002", "step-0000000001", WRITER_NAME][:moved]:
        (tmp_path / name).rename(hidden / name)
    with Checkpointer(tmp_path, run="new", fresh=True) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
    assert [info.step for info in scan(tmp_path / "aside-1")] == [2, 1]
    assert [path.name for path in contents(tmp_path)] == ["aside-1"]


@pytest.mark.usefixtures("impatient")
def test_nothing_is_set_aside_of_a_run_that_goes_on(tmp_path, other):
    with Checkpointer(tmp_path, run="old") as ckpt:
        ckpt.save(1, state_of(1)).result()
    other("old")
    with pytest.raises(BadUse, match="Another process saves into"):
        Checkpointer(tmp_path, run="new", fresh=True).restore(state_of(0))
    assert [info.step for info in scan(tmp_path)] == [1]


def test_two_of_one_process_share_it_until_the_last_is_closed(tmp_path):
    with Checkpointer(tmp_path) as outer:
        outer.save(1, state_of(1)).result()
        with Checkpointer(tmp_path) as inner:
            assert inner.restore(state_of(0)) == 1
        outer.save(2, state_of(2)).result()
        held = list(writer_lease._held)
    assert (held, list(writer_lease._held)) == ([str(tmp_path / WRITER_NAME)], [])


def test_a_folder_that_was_made_anew_is_taken_anew(tmp_path):
    folder = tmp_path / "run"
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state_of(1)).result()
        folder.rename(tmp_path / "away")
        with Checkpointer(folder) as newer:
            newer.save(1, state_of(1)).result()
            assert read_holder(folder).token != read_holder(tmp_path / "away").token


def test_a_file_system_without_locks_goes_on_and_the_later_one_takes_over(
    tmp_path, other, monkeypatch
):
    other("a")

    def none(_fd, _operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, state_of(1)).result()


def test_where_who_saves_cannot_be_written_it_is_said_and_training_goes_on(
    tmp_path, monkeypatch, caplog
):
    def full(*_arguments, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_lease, "_take", full)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, state_of(1)).result()
    assert any("cannot be detected: [Errno 28]" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"run": 1}', b"\xff"])
def test_a_file_that_says_nothing_is_replaced(tmp_path, content):
    (tmp_path / WRITER_NAME).write_bytes(content)
    acquire(tmp_path, Identity(run="a"), now_s=1.0)
    assert read_holder(tmp_path).run == "a"


def test_what_a_killed_one_left_on_the_way_is_removed(tmp_path):
    (tmp_path / f"{WRITER_NAME}.abcd.tmp").write_bytes(b"{")
    acquire(tmp_path, Identity(), now_s=1.0)
    assert [path.name for path in tmp_path.iterdir()] == [WRITER_NAME]


@pytest.mark.parametrize("options", [{"run": ""}, {"run": 1}, {"fresh": True, "read_only": True}])
def test_what_cannot_be_is_refused(tmp_path, options):
    with pytest.raises(BadUse):
        Checkpointer(tmp_path, **options)


def test_a_writing_process_that_is_taken_over_from_takes_up_nothing(tmp_path):
    """This also holds for a process that outlives its trainer: its save gets no name."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state_of(1)).result()
    pid = ckpt._engine._writer.pid
    os.kill(pid, signal.SIGSTOP)
    handle = ckpt.save(2, state_of(2))
    _holder_file(tmp_path).replace(tmp_path / WRITER_NAME)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(SaveFailed, match="has been taken over by"):
        handle.result()
    until(lambda: not list(tmp_path.glob(".step-*")))
    assert [info.step for info in scan(tmp_path)] == [1]


def test_a_trainer_that_is_taken_over_from_ends_at_its_next_call(tmp_path):
    """By default, a failed save is repeated; this trainer would train in vain."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state_of(1)).result()
    _holder_file(tmp_path).replace(tmp_path / WRITER_NAME)
    until(ckpt.save(2, state_of(2)).done)
    with pytest.raises(
        SaveFailed,
        match=r"Step 2 was not saved: .* has been taken over by .*This process must end\.$",
    ):
        ckpt.save(3, state_of(3))
    ckpt.close()


def test_a_trainer_that_is_taken_over_from_deletes_nothing_of_its_successor(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state_of(1)).result()
    _holder_file(tmp_path).replace(tmp_path / WRITER_NAME)
    unfinished = tmp_path / ".step-0000000009.abcd-1.tmp"
    unfinished.mkdir()
    os.kill(
        ckpt._engine._writer.pid, signal.SIGKILL
    )  # another process looks for leftovers of dead ones
    with pytest.raises(SaveFailed, match="has been taken over by"):
        ckpt.save(2, state_of(2)).result()
    ckpt.close()
    assert unfinished.is_dir()


def test_a_full_disk_is_the_successor_s_to_make_room_on(tmp_path, monkeypatch):
    monkeypatch.setattr(writing_process, "make_room", lambda *_: pytest.fail("deleted"))
    _holder_file(tmp_path).replace(tmp_path / WRITER_NAME)
    order = replace(order_of(tmp_path, 2), lease="own")
    assert not writing_process.Service._make_room(None, order, hand_made(), errno.ENOSPC)


def _holder_file(folder):
    path = folder.with_name(f"{folder.name}.holder")
    path.write_text(
        json.dumps(
            {"run": "", "generation": 1, "host": "h", "pid": 9, "since_s": 1.0, "token": "other"}
        )
    )
    return path
