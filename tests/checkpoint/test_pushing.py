"""The process that pushes to object storage, and restoring from there."""

import contextlib
import errno
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from storage_world import BRIEF, make_checkpoint
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, pushing_process, remote_push, scan
from holdfast.checkpoint import folders as folders_module
from holdfast.checkpoint import pushing as pushing_module
from holdfast.checkpoint.folders import Staging, has_unfinished, step_path
from holdfast.checkpoint.marks import note_damaged, read_marks
from holdfast.checkpoint.pushing import PUSHING_MODULE
from holdfast.checkpoint.remote import Remote
from holdfast.core.errors import BadUse, NoVerifiedCheckpoint, StorageFailed


@pytest.fixture
def there(tmp_path):
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


def state_of(value):
    return {"t": torch.full((5000,), float(value)), "value": value}


def steps_of(url):
    return [each.step for each in Remote(url).scan() if each.state == "written"]


def pushing(folder):
    """The process ids of those that push what is in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if PUSHING_MODULE in words and str(folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_saved_is_in_storage_once_it_is_closed(tmp_path, there, link):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        ckpt.save(1, state_of(1)).result()
        until(lambda: steps_of(url) == [1])
        ckpt.save(2, state_of(2))
    assert steps_of(url)[0] == 2
    assert pushing(folder) == []
    pushed = [event for kind, event in link.events if kind == "pushed"]
    assert pushed[-1]["step"] == 2
    assert pushed[-1]["size_bytes"] > 20_000
    assert not any(read_marks(info.path).wanted for info in scan(folder))


def test_as_many_stay_there_as_are_to(tmp_path, there):
    url = there.as_uri()
    with Checkpointer(tmp_path / "here", push_to=url, keep_pushed=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url) == [step])
    assert steps_of(url) == [3]


def test_a_new_node_restores_what_was_pushed(tmp_path, there):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(7, state_of(7))
    state = state_of(0)
    assert Checkpointer(tmp_path / "new", push_to=there.as_uri()).restore(state) == 7
    assert state["value"] == 7
    assert state["t"].eq(7).all()


def test_a_damaged_one_is_fetched_again(tmp_path, there):
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    flip(step_path(folder, 2) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 2
    assert state["t"].eq(2).all()


def test_one_that_is_damaged_there_too_is_passed_over(tmp_path, there):
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    for path in (*there.glob("step-0000000002.*/__0_0.distcp"), step_path(folder, 2) / "__0_0.distcp"):
        flip(path)
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 1
    assert state["t"].eq(1).all()


def test_a_damaged_one_that_storage_has_not_is_passed_over(tmp_path, there):
    """The newest is often not pushed yet."""
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        ckpt.save(1, state_of(1))
    with Checkpointer(folder) as ckpt:
        ckpt.save(2, state_of(2))
    flip(step_path(folder, 2) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 1
    assert state["t"].eq(1).all()


@pytest.mark.parametrize("local", [(3,), (1, 3)])
def test_an_older_one_is_fetched_where_what_is_here_is_damaged(tmp_path, there, local):
    """Not of the damaged one's step, and newer than what else there is."""
    folder = tmp_path / "here"
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(2, state_of(2))
    with Checkpointer(folder) as ckpt:
        for step in local:
            ckpt.save(step, state_of(step)).result()
    flip(step_path(folder, 3) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 2
    assert state["t"].eq(2).all()


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_storage_that_has_nothing_whole_is_no_reason_to_begin_anew(tmp_path, there, damage):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(1, state_of(1))
    damage(next(there.glob("step-*/__0_0.distcp")))
    ckpt = Checkpointer(tmp_path / "new", push_to=there.as_uri())
    assert ckpt.has_any()
    with pytest.raises(NoVerifiedCheckpoint, match=r"No checkpoint in storage verifies \(step 1: .*__0_0.distcp"):
        ckpt.restore(state_of(0))


def test_what_was_pushed_last_does_not_go_for_a_later_step_of_another_run(tmp_path, there):
    url = there.as_uri()
    with Checkpointer(tmp_path / "former", push_to=url) as ckpt:
        ckpt.save(10, state_of(10))
    with Checkpointer(tmp_path / "here", push_to=url, keep_pushed=1) as ckpt:
        ckpt.save(4, state_of(4)).result()
        until(lambda: 4 in steps_of(url))
        ckpt.save(5, state_of(5))
    assert steps_of(url) == [10, 5]


def test_a_child_that_was_forked_does_not_keep_it_from_ending(tmp_path, there):
    ckpt = Checkpointer(tmp_path / "here", push_to=there.as_uri())
    ckpt.save(1, state_of(1)).result()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10 * ENDS_S,))
    child.start()
    closing = threading.Thread(target=ckpt.close, daemon=True)
    closing.start()
    closing.join(ENDS_S)
    child.kill()
    child.join()
    assert not closing.is_alive()
    assert steps_of(there.as_uri()) == [1]


def test_a_trainer_that_was_forked_after_it_was_made_has_one_too(tmp_path, there):
    script = (
        "import os, sys, time, torch, holdfast\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1], push_to=sys.argv[2])\n"
        "if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "ckpt.save(1, {'t': torch.ones(5000)}).result(); time.sleep(1.5)\n"  # one that thinks it has gone ends by then
        "ckpt.save(2, {'t': torch.ones(5000)}); ckpt.close(); os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "here"), there.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "started again" not in ended.stderr
    assert steps_of(there.as_uri()) == [2, 1]


def test_what_becomes_durable_while_it_looks_is_pushed(tmp_path, there, monkeypatch):
    """The last save of a trainer that is dead, which its writing process ends."""
    looks = []

    def scan_late(folder):
        found = scan(folder)
        if not looks:
            make_checkpoint(folder, 1)
        looks.append(folder)
        return found

    monkeypatch.setattr(pushing_process, "scan", scan_late)
    monkeypatch.setattr(pushing_process, "has_unfinished", lambda _: not looks)
    monkeypatch.setattr(pushing_process.Pushing, "_has_ended", lambda *_: True)
    pushing = pushing_process.Pushing(tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60)
    assert pushing.run() == 0
    assert steps_of(there.as_uri()) == [1]


def test_a_damaged_one_does_not_keep_the_others_from_storage(tmp_path, there, monkeypatch):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    flip(step_path(tmp_path, 3) / "__0_0.distcp")
    note_damaged(step_path(tmp_path, 2), "a bit", by="me", now_s=1.0)
    monkeypatch.setattr(pushing_process.Pushing, "_has_ended", lambda *_: True)
    pushing = pushing_process.Pushing(tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60)
    assert pushing.run() == 1  # the newest is not there
    assert steps_of(there.as_uri()) == [1]


@pytest.mark.parametrize(("times", "pushed"), [(1, 2), (1000, 1)])
def test_one_that_cannot_be_read_for_a_while_is_tried_again(tmp_path, there, monkeypatch, times, pushed):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    monkeypatch.setattr(pushing_process, "_LONGEST_PAUSE_S", 0.1)
    real, opened = Path.open, []

    def open_badly(path, *arguments, **named):
        if path.name.endswith(".distcp") and "-0000000002" in str(path) and len(opened) < times:
            opened.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(remote_push.Path, "open", open_badly)
    monkeypatch.setattr(pushing_process.Pushing, "_has_ended", lambda *_: True)
    pushing = pushing_process.Pushing(tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60)
    assert pushing.run() == (pushed == 1)
    assert opened
    assert steps_of(there.as_uri()) == [pushed]


def test_what_a_dead_trainer_had_ordered_may_begin_a_little_later(tmp_path, there):
    """Its writing process may have something else to do first."""
    script = (
        "import subprocess, sys\n"
        "pusher = subprocess.Popen([sys.executable, '-m', sys.argv[1], str(__import__('os').getpid()), *sys.argv[2:]],"
        " stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, PUSHING_MODULE, str(tmp_path / "here"), there.as_uri()]
    (tmp_path / "here").mkdir()
    made = make_checkpoint(tmp_path / "made", 1)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as trainer:
        until(lambda: len(pushing(tmp_path / "here")) == 2)  # the trainer's words name it, too
        trainer.kill()
    time.sleep(2)
    made.rename(tmp_path / "here" / made.name)
    until(lambda: pushing(tmp_path / "here") == [])
    assert steps_of(there.as_uri()) == [1]


def test_where_folders_cannot_be_locked_age_tells_what_is_unfinished(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    left = Staging(tmp_path, 2, "dead")
    os.close(left._fd)
    assert not has_unfinished(tmp_path)  # a lock tells, whatever its age
    left.path.rmdir()
    staging = Staging(tmp_path, 1, "save")
    assert has_unfinished(tmp_path)
    monkeypatch.setattr(folders_module.fcntl, "flock", refuse)
    assert has_unfinished(tmp_path)  # something has changed just now
    os.utime(staging.path, (1e9, 1e9))
    assert not has_unfinished(tmp_path)
    (staging.path / "file").touch()
    assert has_unfinished(tmp_path)
    staging.abandon()


def test_storage_that_cannot_be_reached_stops_nothing_but_a_restore_from_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(pushing_module, "Remote", functools.partial(Remote, patience=BRIEF))
    with Checkpointer(tmp_path / "here") as ckpt:
        ckpt.save(1, state_of(1))
    state = state_of(0)
    assert Checkpointer(tmp_path / "here", push_to="s3://bucket/run").restore(state) == 1
    assert "What storage has was not fetched" in caplog.text
    with Checkpointer(tmp_path / "here") as ckpt:
        ckpt.save(2, state_of(2))
    flip(step_path(tmp_path / "here", 2) / "__0_0.distcp")
    assert Checkpointer(tmp_path / "here", push_to="s3://bucket/run").restore(state) == 1
    assert "Step 2 was not to be had from storage either" in caplog.text
    with pytest.raises(StorageFailed):
        Checkpointer(tmp_path / "empty", push_to="s3://bucket/run").restore(state)


def test_a_wrong_address_is_refused_at_once(tmp_path):
    with pytest.raises(BadUse, match="nothing"):
        Checkpointer(tmp_path, push_to="nothing://bucket")
    with pytest.raises(BadUse, match="keep_pushed"):
        Checkpointer(tmp_path, push_to=tmp_path.as_uri(), keep_pushed=0)


def test_one_that_is_killed_is_started_again_and_sends_what_is_missing(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        ckpt.save(1, state_of(1)).result()
        until(lambda: steps_of(url) == [1])
        [pid] = pushing(folder)
        os.kill(pid, signal.SIGKILL)
        ckpt.save(2, state_of(2)).result()
    assert steps_of(url)[0] == 2


def test_a_trainer_that_is_killed_has_its_last_save_pushed(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    script = (
        "import os, signal, sys, time, torch, holdfast\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1], push_to=sys.argv[2], max_write_mib_s=0.01)\n"  # two seconds a save
        "ckpt.save(1, {'t': torch.ones(5000)}).result()\n"
        "ckpt.save(2, {'t': torch.ones(5000)}); ckpt.before_update()\n"
        "if not (child := os.fork()): time.sleep(1000); os._exit(0)\n"  # which holds its files open
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder), url], stdout=subprocess.PIPE) as trainer:
        child = int(trainer.stdout.readline())
        trainer.wait(ENDS_S)
        try:
            until(lambda: pushing(folder) == [])
        finally:
            os.kill(child, signal.SIGKILL)
    assert steps_of(url)[0] == 2
