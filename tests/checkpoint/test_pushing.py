"""Test the process that pushes to object storage, and restores from storage."""

import contextlib
import errno
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from storage_world import BRIEF, QUICK, SMALL, make_checkpoint, new_bucket, proxy
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, Retention, scan
from holdfast.checkpoint.catalog import staging_dir
from holdfast.checkpoint.catalog.annotations import note_damaged, read_marks
from holdfast.checkpoint.catalog.staging_dir import Staging, has_unfinished
from holdfast.checkpoint.distributed import collectives
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage import push as push_module
from holdfast.checkpoint.storage import push as remote_push
from holdfast.checkpoint.storage import upload_process, uploader
from holdfast.checkpoint.storage.object_store import Objects, Patience
from holdfast.checkpoint.storage.push import note_pushed, pushed_names
from holdfast.checkpoint.storage.remote import Remote
from holdfast.checkpoint.storage.uploader import PUSHING_MODULE
from holdfast.core.errors import BadUse, NoVerifiedCheckpoint, StorageFailed
from holdfast.core.sockets import readable


@pytest.fixture
def there(tmp_path):
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture(autouse=True)
def _no_pusher_is_left(monkeypatch):
    """End all pushing processes, also those of jobs that have only restored."""
    made, start = [], uploader.Pusher.start

    def record(self):
        made.append(self)
        start(self)

    monkeypatch.setattr(uploader.Pusher, "start", record)
    yield
    for pusher in made:
        pusher._is_needed = False
        if pusher._process is not None:
            pusher._process.kill()
            pusher._process.wait()


@pytest.fixture
def ended(monkeypatch):
    """Make the trainer appear to have ended."""
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: True)


def run_pushing(folder, url, **settings):
    settings = {"trainer_pid": 1, "keep": None, "give_up_s": 60, **settings}
    return upload_process.Pushing(folder, Remote(url), **settings).run()


def state_of(value):
    return {"t": torch.full((5000,), float(value)), "value": value}


def steps_of(url):
    return [each.step for each in Remote(url).scan() if each.state == "written"]


def is_pushed(folder, url, step):
    """Return True if the step's current save in storage was pushed from `folder`."""
    return (
        Remote(url).find(step).name in pushed_names(folder, url) if step in steps_of(url) else False
    )


def pushing(folder):
    """Return the ids of the processes that push from `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if (
                PUSHING_MODULE in words
                and str(folder) in words
                and process.status() != psutil.STATUS_ZOMBIE
            ):
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
    for path in (
        *there.glob("step-0000000002.*/__0_0.distcp"),
        step_path(folder, 2) / "__0_0.distcp",
    ):
        flip(path)
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 1
    assert state["t"].eq(1).all()


def test_a_damaged_one_that_storage_has_not_is_passed_over(tmp_path, there):
    """The newest checkpoint is often not pushed yet."""
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
    """The fetched step is not the damaged step, and newer than the other local steps."""
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
    with pytest.raises(
        NoVerifiedCheckpoint, match=r"No checkpoint in storage verifies \(step 1: .*__0_0.distcp"
    ):
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
        "ckpt.save(1, {'t': torch.ones(5000)}).result(); time.sleep(1.5)\n"  # by then a mistaken pusher ends
        "ckpt.save(2, {'t': torch.ones(5000)}); ckpt.close(); os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "here"), there.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "started again" not in ended.stderr
    assert steps_of(there.as_uri()) == [2, 1]


def test_what_becomes_durable_while_it_looks_is_pushed(tmp_path, there, monkeypatch):
    """The last save of a dead trainer, which its writing process completes."""
    looks = []

    def scan_late(folder):
        found = scan(folder)
        if not looks:
            make_checkpoint(folder, 1)
        looks.append(folder)
        return found

    monkeypatch.setattr(upload_process, "scan", scan_late)
    monkeypatch.setattr(upload_process, "has_unfinished", lambda _: not looks)
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: True)
    pushing = upload_process.Pushing(
        tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60
    )
    assert pushing.run() == 0
    assert steps_of(there.as_uri()) == [1]


def test_a_damaged_one_does_not_keep_the_others_from_storage(tmp_path, there, monkeypatch):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    flip(step_path(tmp_path, 3) / "__0_0.distcp")
    note_damaged(step_path(tmp_path, 2), "a bit", by="me", now_s=1.0)
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: True)
    pushing = upload_process.Pushing(
        tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60
    )
    assert pushing.run() == 1  # the newest is missing
    assert steps_of(there.as_uri()) == [1]


@pytest.mark.parametrize(("times", "pushed"), [(1, 2), (1000, 1)])
def test_one_that_cannot_be_read_for_a_while_is_tried_again(
    tmp_path, there, monkeypatch, times, pushed
):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    monkeypatch.setattr(upload_process, "_LONGEST_PAUSE_S", 0.1)
    real, opened = Path.open, []

    def open_badly(path, *arguments, **named):
        if path.name.endswith(".distcp") and "-0000000002" in str(path) and len(opened) < times:
            opened.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(remote_push.Path, "open", open_badly)
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: True)
    pushing = upload_process.Pushing(
        tmp_path, Remote(there.as_uri()), trainer_pid=1, keep=None, give_up_s=60
    )
    assert pushing.run() == (pushed == 1)
    assert opened
    assert steps_of(there.as_uri()) == [pushed]


def test_what_a_dead_trainer_had_ordered_may_begin_a_little_later(tmp_path, there):
    """The writing process may have other work first."""
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
    assert not has_unfinished(tmp_path)  # the lock decides, at any age
    left.path.rmdir()
    staging = Staging(tmp_path, 1, "save")
    assert has_unfinished(tmp_path)
    monkeypatch.setattr(staging_dir.fcntl, "flock", refuse)
    assert has_unfinished(tmp_path)  # a file changed just now
    os.utime(staging.path, (1e9, 1e9))
    assert not has_unfinished(tmp_path)
    (staging.path / "file").touch()
    assert has_unfinished(tmp_path)
    staging.abandon()


def test_storage_that_cannot_be_reached_stops_nothing_but_a_restore_from_nothing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(uploader, "Remote", functools.partial(Remote, patience=BRIEF))
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
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder), url], stdout=subprocess.PIPE
    ) as trainer:
        child = int(trainer.stdout.readline())
        trainer.wait(ENDS_S)
        try:
            until(lambda: pushing(folder) == [])
        finally:
            os.kill(child, signal.SIGKILL)
    assert steps_of(url)[0] == 2


def test_what_was_taken_away_after_it_was_pushed_does_not_come_back(tmp_path, there, caplog):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    step_path(folder, 2).rename(tmp_path / "away")
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 1
    assert (
        f"Step 2 is in storage and was taken away from {folder}, so it is not fetched"
        in caplog.text
    )
    assert (
        Checkpointer(tmp_path / "new", push_to=url).restore(state_of(0)) == 2
    )  # if there is nothing else
    with Checkpointer(tmp_path / "elsewhere", push_to=url) as ckpt:
        ckpt.save(3, state_of(3))
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 3


def test_what_is_damaged_was_not_taken_away(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    (step_path(folder, 2) / "__0_0.distcp").unlink()
    state = state_of(0)
    assert Checkpointer(folder, push_to=url).restore(state) == 2
    assert state["t"].eq(2).all()


def test_what_another_node_pushed_was_not_taken_away(tmp_path, there):
    """After going back, the job continued on another node and came back, up to the same steps."""
    folder, elsewhere, url = tmp_path / "here", tmp_path / "elsewhere", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 20, 30):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    for step in (20, 30):
        step_path(folder, step).rename(tmp_path / f"away{step}")
    for step in (10, 20):
        with Checkpointer(elsewhere, push_to=url) as ckpt:
            ckpt.save(step, state_of(-step))
        state = state_of(0)
        assert Checkpointer(folder, push_to=url).restore(state) == step
        assert state["value"] == -step


def test_what_was_taken_away_stays_so_after_further_pushes_of_lower_steps(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 20, 30):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    for step in (20, 30):
        step_path(folder, step).rename(tmp_path / f"away{step}")
    with Checkpointer(folder, push_to=url) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
        ckpt.save(10, state_of(10))
    assert steps_of(url) == [30, 20, 10, 1]
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 10


def test_where_the_save_that_replaced_another_was_taken_away_the_other_does_not_come_either(
    tmp_path, there
):
    elsewhere, folder, url = tmp_path / "elsewhere", tmp_path / "here", there.as_uri()
    for into, sign in ((elsewhere, -1), (folder, 1)):
        with Checkpointer(into, push_to=url) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state_of(sign * step)).result()
                until(lambda into=into, step=step: is_pushed(into, url, step))
    step_path(folder, 2).rename(tmp_path / "away")
    state = state_of(0)
    assert Checkpointer(folder, push_to=url).restore(state) == 1
    assert state["value"] == 1


def test_what_a_policy_deleted_comes_in_the_place_of_a_damaged_one(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url, keep=Retention(last=1, every_steps=50)) as ckpt:
        for step in (50, 60, 80):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: is_pushed(folder, url, step))
    with Checkpointer(folder, keep=Retention(last=1, every_steps=50)) as ckpt:
        ckpt.save(90, state_of(90))
    assert [info.step for info in scan(folder)] == [90, 50]
    flip(step_path(folder, 90) / "__0_0.distcp")
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 80


def test_of_two_saves_of_a_step_the_other_is_fetched_where_the_newer_is_damaged(tmp_path, there):
    url = there.as_uri()
    for value in (1, -1):
        with Checkpointer(tmp_path / str(value), push_to=url) as ckpt:
            ckpt.save(2, state_of(value))
    newer, _ = Remote(url).scan()
    flip(there / newer.name / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(tmp_path / "new", push_to=url).restore(state) == 2
    assert state["value"] == 1


def test_what_is_pushed_is_known_before_it_is_there(tmp_path, there, ended, monkeypatch):
    """After a kill at that point and a push of a newer step, the name would be unknown."""
    real = Remote.push

    def push_and_die(self, folder):
        real(self, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "push", push_and_die)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    with pytest.raises(KeyboardInterrupt):
        run_pushing(tmp_path, there.as_uri())
    assert pushed_names(tmp_path, there.as_uri()) == [each.name for each in there.iterdir()]


def test_what_was_pushed_is_known_by_storage_and_its_name_there(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(push_module, "_MOST_NAMES", 2)
    assert pushed_names(tmp_path, "file:///a") == []
    note_pushed(tmp_path, "file:///a", "step-0000000007.a")
    note_pushed(tmp_path, "file:///b", "step-0000000009.b")
    for name in ("step-0000000005.c", "step-0000000005.c", "step-0000000006.d"):
        note_pushed(tmp_path, "file:///a", name)
    assert pushed_names(tmp_path, "file:///a") == ["step-0000000006.d", "step-0000000007.a"]
    assert pushed_names(tmp_path, "file:///b") == ["step-0000000009.b"]
    assert pushed_names(tmp_path, "file:///c") == []
    assert scan(tmp_path) == []
    next(tmp_path.iterdir()).write_bytes(b"[]")
    assert pushed_names(tmp_path, "file:///a") == []
    assert "is not known" in caplog.text


def test_what_cannot_be_read_for_a_moment_is_not_written_over(tmp_path, monkeypatch):
    note_pushed(tmp_path, "file:///a", "step-0000000007.a")

    def stale(_path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(push_module.Path, "read_bytes", stale)
        with pytest.raises(OSError, match="Stale"):
            note_pushed(tmp_path, "file:///a", "step-0000000008.b")
        assert pushed_names(tmp_path, "file:///a") == []
    assert pushed_names(tmp_path, "file:///a") == ["step-0000000007.a"]


def test_while_a_fetch_gets_on_the_time_of_its_section_begins_anew(
    tmp_path, there, link, monkeypatch
):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(7, state_of(7))
    monkeypatch.setattr(collectives, "_LOOK_EVERY_S", 0.01)
    real = Objects.read_range

    def at_length(self, *which):
        until(lambda: real(self, *which) and link.sections.count("restore") > 1)
        return real(self, *which)

    monkeypatch.setattr(Objects, "read_range", at_length)
    assert Checkpointer(tmp_path / "new", push_to=there.as_uri()).restore(state_of(0)) == 7


def test_what_does_not_get_on_has_no_more_time_than_its_section(link, monkeypatch):
    monkeypatch.setattr(collectives, "_LOOK_EVERY_S", 0.01)
    looks = []
    collectives.Ranks().first_at_length(
        lambda: until(lambda: len(looks) > 3), signs=lambda: looks.append(0) or 0, section="restore"
    )
    assert link.sections == []


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Run a test's own program as the pushing process."""

    def run_instead(program):
        (tmp_path / "stand_in.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(uploader, "PUSHING_MODULE", "stand_in")
        monkeypatch.setattr(uploader, "_LOOK_EVERY_S", 0.01)
        pusher = uploader.Pusher(tmp_path, tmp_path.as_uri(), keep=None, on_message=lambda _: None)
        pusher.start()
        return pusher

    return run_instead


def test_closing_waits_for_a_push_that_gets_on_and_says_so(tmp_path, stand_in, link, monkeypatch):
    pusher = stand_in(
        "import pathlib, sys, time\n"
        "while not (pathlib.Path(sys.argv[2]) / 'enough').exists():\n"
        "    print('{\"signs\": 1}', flush=True); time.sleep(0.01)\n"
    )
    monkeypatch.setattr(uploader, "_SILENT_S", ENDS_S)
    closing = threading.Thread(target=functools.partial(pusher.close, wait=True), daemon=True)
    closing.start()
    until(lambda: link.sections.count("save") > 2)
    assert closing.is_alive()
    (tmp_path / "enough").touch()
    closing.join(ENDS_S)
    assert not closing.is_alive()


def test_closing_does_not_wait_for_ever_for_a_push_that_does_not_get_on(
    stand_in, monkeypatch, caplog
):
    pusher = stand_in("import time; time.sleep(1000)")
    monkeypatch.setattr(uploader, "_SILENT_S", 0.05)
    pusher.close(wait=True)
    assert pusher._process.poll() is None
    assert "The newest checkpoint is not in" in caplog.text


def test_what_nobody_pushed_is_pushed_by_the_next_one_that_restores_it(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state_of(1))
    with Checkpointer(folder, push_to=url) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
    assert steps_of(url) == [1]


def test_that_old_ones_cannot_be_deleted_is_said_once_and_is_no_failed_push(
    tmp_path, there, ended, monkeypatch, caplog, capsys
):
    def refuse(*_):
        raise StorageFailed("you may not.")

    monkeypatch.setattr(Remote, "delete", refuse)
    Remote(there.as_uri()).push(make_checkpoint(tmp_path / "former", 1, sizes=SMALL))
    make_checkpoint(tmp_path / "here", 2, sizes=SMALL)
    assert run_pushing(tmp_path / "here", there.as_uri(), keep=1, give_up_s=0.5) == 0
    assert caplog.text.count("you may not.") == 1
    assert '"failed"' not in capsys.readouterr().out


@pytest.mark.parametrize("lasts", [False, True])
def test_where_it_cannot_be_started_training_goes_on_and_the_next_save_tries_again(
    tmp_path, there, monkeypatch, caplog, lasts
):
    real = subprocess.Popen

    def refuse(command, **settings):
        if PUSHING_MODULE in command:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(command, **settings)

    with Checkpointer(tmp_path / "here", push_to=there.as_uri()) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(uploader.subprocess, "Popen", refuse)
            ckpt.save(1, state_of(1)).result()
            assert (
                "could not be started ([Errno 11] Resource temporarily unavailable)" in caplog.text
            )
            if lasts:
                ckpt.close()
        if not lasts:
            ckpt.save(2, state_of(2)).result()
    assert ("The newest checkpoint is not in" in caplog.text) == lasts
    assert steps_of(there.as_uri())[:1] == ([] if lasts else [2])


def test_where_no_thread_can_hear_it_training_goes_on_and_the_next_save_tries_again(
    tmp_path, there, monkeypatch, caplog
):
    real, refused = threading.Thread.start, []

    def refuse(thread):
        if getattr(thread._target, "__name__", "") == "_listen" and not refused:
            refused.append(thread._args[0])
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(uploader.threading.Thread, "start", refuse)
    with Checkpointer(tmp_path / "here", push_to=there.as_uri()) as ckpt:
        ckpt.save(1, state_of(1)).result()
        assert "could not be started (can't start new thread)" in caplog.text
        assert refused[0].returncode == -signal.SIGKILL
    assert "started again" not in caplog.text
    assert steps_of(there.as_uri()) == [1]


def test_a_pusher_whose_trainer_is_gone_does_not_wait_for_a_successor_that_is_always_saving(
    tmp_path, there, ended, monkeypatch
):
    monkeypatch.setattr(upload_process, "_LOOK_EVERY_S", 0.001)
    looks = iter(range(1000))
    monkeypatch.setattr(upload_process, "has_unfinished", lambda _: next(looks) >= 0)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    assert run_pushing(tmp_path, there.as_uri(), give_up_s=0.01) == 0
    assert steps_of(there.as_uri()) == [1]


def test_a_pusher_whose_trainer_is_gone_leaves_what_is_saved_after_it_to_another(
    tmp_path, there, ended
):
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    make_checkpoint(tmp_path, 2, seed=10**9, sizes=SMALL)  # saved in the year 2033
    assert run_pushing(tmp_path, there.as_uri()) == 0
    assert steps_of(there.as_uri()) == [1]


def test_a_checkpoint_is_wanted_under_a_name_of_ones_own_for_a_time_that_is_renewed(
    tmp_path, there, ended, monkeypatch
):
    monkeypatch.setattr(upload_process, "_SIGN_EVERY_S", 0.01)
    monkeypatch.setattr(upload_process, "_WANTED_FOR_S", 0.03)
    path, seen, real = make_checkpoint(tmp_path, 1, sizes=SMALL), [], Remote.push

    def push(self, folder):
        [[name, first]] = read_marks(path).wanted.items()
        until(lambda: read_marks(path).wanted[name].at_s > first.at_s)
        seen.extend([name, first.until_s - first.at_s])
        return real(self, folder)

    monkeypatch.setattr(Remote, "push", push)
    assert run_pushing(tmp_path, there.as_uri()) == 0
    assert seen == [f"push-{socket.gethostname()}-{os.getpid()}", pytest.approx(0.03, abs=1e-5)]
    assert not read_marks(path).wanted


def test_a_folder_that_cannot_be_written_keeps_nothing_from_storage(
    tmp_path, there, ended, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("want", "release", "note_pushed"):
        monkeypatch.setattr(upload_process, name, refuse)
    for step in (1, 2):
        make_checkpoint(tmp_path, step, sizes=SMALL)
    assert run_pushing(tmp_path, there.as_uri(), give_up_s=0.5) == 0
    assert steps_of(there.as_uri()) == [2]
    assert caplog.text.count("cannot be marked as wanted") == 1
    assert caplog.text.count("is not noted in") == 1


def test_a_folder_in_which_nothing_changes_is_not_looked_through_again(
    tmp_path, there, monkeypatch
):
    looks, turns = [], iter(range(20))
    monkeypatch.setattr(upload_process, "scan", lambda folder: looks.append(folder) or scan(folder))

    def has_ended(*_):
        turn = next(turns)
        if turn == 9:
            assert len(looks) < 5
            make_checkpoint(tmp_path, 2, sizes=SMALL)
            os.utime(tmp_path, (1e9, 1e9))  # another time, on any file system
        if turn == 12:
            assert steps_of(there.as_uri()) == [2, 1]
        return turn == 19

    monkeypatch.setattr(upload_process.Pushing, "_has_ended", has_ended)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    assert run_pushing(tmp_path, there.as_uri()) == 0
    assert len(looks) < 10


def test_a_look_that_fails_is_taken_again(tmp_path, there, monkeypatch, caplog):
    turns, failing = (
        iter(range(4)),
        [OSError(errno.EIO, "Input/output error"), FileNotFoundError(), None, None],
    )

    def fail_at_times(folder):
        if failing and (error := failing.pop(0)) is not None:
            raise error
        return scan(folder)

    monkeypatch.setattr(upload_process, "scan", fail_at_times)
    monkeypatch.setattr(upload_process, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: next(turns) == 3)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    assert run_pushing(tmp_path, there.as_uri()) == 0
    assert steps_of(there.as_uri()) == [1]
    assert "cannot be seen yet: [Errno 5] Input/output error" in caplog.text
    assert caplog.text.count("cannot be seen yet") == 1


def test_whoever_reads_what_a_dead_trainer_said_does_not_wait_for_the_last_push(tmp_path, there):
    script = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-m', sys.argv[1], str(os.getpid()), *sys.argv[2:]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "here").mkdir()
    staging = Staging(tmp_path / "here", 1, "save")  # keeps the process waiting
    command = [sys.executable, "-c", script, PUSHING_MODULE, str(tmp_path / "here"), there.as_uri()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
        until(lambda: len(pushing(tmp_path / "here")) == 2)  # the trainer's words name it, too
        trainer.kill()
        trainer.wait()
        until(lambda: readable([trainer.stderr.fileno()], 0))
        assert trainer.stderr.read() == b""
    [pid] = pushing(tmp_path / "here")
    os.kill(pid, signal.SIGKILL)
    staging.abandon()


def test_storage_that_only_stalls_does_not_keep_a_job_with_a_checkpoint_waiting(
    s3, tmp_path, monkeypatch, caplog
):
    hurried = Patience(request_timeout_s=0.05, tries=2, attempts=1, first_pause_s=0.001)
    monkeypatch.setattr(uploader, "_HURRIED", hurried)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    with proxy(s3, lambda *_: "stall") as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        uploader.fetch_newer(Remote(f"s3://{new_bucket(s3)}/run", patience=QUICK), tmp_path)
        assert len(between.requests) == 2
    assert "What storage has was not fetched, step 1 of" in caplog.text


def test_a_look_at_storage_that_gets_on_gives_signs_where_there_is_a_checkpoint_here_too(
    tmp_path, there
):
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    remote = Remote(there.as_uri())
    uploader.fetch_newer(remote, tmp_path)
    assert remote.signs > 0


def save_all(folder, url, *steps, sign=1, **options):
    """Save and push each step, and restore nothing."""
    with Checkpointer(folder, push_to=url, keep=None, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(sign * step)).result()
            until(lambda step=step: is_pushed(folder, url, step))


def restored(folder, url, **options):
    state = state_of(0)
    step = Checkpointer(folder, push_to=url, **options).restore(state)
    return step, state["value"]


def test_of_storage_that_two_runs_share_each_has_its_own(tmp_path, there):
    url = there.as_uri()
    save_all(tmp_path / "old", url, 3000, run="old")
    with pytest.raises(
        BadUse,
        match=r"another run alone \(run 'old', step 3000\).*this is run 'new'.*--resume old.*fresh=True.*fetch\(",
    ):
        restored(tmp_path / "refused", url, run="new")
    fresh = {"run": "new", "fresh": True}
    ckpt = Checkpointer(tmp_path / "begun", push_to=url, **fresh)
    assert not ckpt.has_any()
    assert ckpt.restore(state_of(0)) == 0
    ckpt.close()
    save_all(tmp_path / "new", url, 10, 20, **fresh)
    assert restored(tmp_path / "lost 1", url, run="new") == (20, 20)
    assert Checkpointer(tmp_path / "lost 2", push_to=url, **fresh).has_any()
    assert restored(tmp_path / "lost 2", url, **fresh) == (20, 20)
    assert restored(tmp_path / "lost 3", url, run="old") == (3000, 3000)
    assert restored(tmp_path / "new", url, run="new") == (
        20,
        20,
    )  # has local steps: newer ones belong to another run


def test_what_another_run_has_in_storage_is_not_fetched_in_the_place_of_a_damaged_one(
    tmp_path, there
):
    folder, url = tmp_path / "new", there.as_uri()
    save_all(tmp_path / "old", url, 15, run="old")
    save_all(folder, url, 10, run="new")
    with Checkpointer(folder, run="new") as ckpt:
        ckpt.restore(state_of(0))
        ckpt.save(20, state_of(20)).result()
    flip(step_path(folder, 20) / "__0_0.distcp")
    assert restored(folder, url, run="new") == (10, 10)


def test_what_training_left_behind_is_not_fetched_unless_its_step_is_asked_for(tmp_path, there):
    folder, url = tmp_path / "lost", there.as_uri()
    save_all(folder, url, 20, 30, 40)
    with Checkpointer(folder, push_to=url, keep=None) as ckpt:
        assert ckpt.restore(state_of(0), step=20) == 20
        ckpt.save(25, state_of(-25)).result()
    new = tmp_path / "new"
    assert restored(new, url) == (25, -25)
    assert restored(new, url) == (25, -25)  # the only one there
    flip(step_path(new, 25) / "__0_0.distcp")
    flip(next(there.glob("step-0000000025.*/__0_0.distcp")))
    assert restored(new, url) == (20, 20)
    state = state_of(0)
    assert Checkpointer(tmp_path / "asked", push_to=url).restore(state, step=40) == 40


def test_what_training_left_behind_takes_no_place_of_those_that_stay_in_storage(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    save_all(folder, url, 20, 30, 40)
    with Checkpointer(folder, push_to=url, keep=None, keep_pushed=2) as ckpt:
        assert ckpt.restore(state_of(0), step=20) == 20
        for step in (25, 45):
            ckpt.save(step, state_of(-step)).result()
            until(lambda step=step: is_pushed(folder, url, step))
    assert steps_of(url) == [45, 40, 30, 25]


def test_one_that_is_dropped_leaves_the_push_to_its_process(tmp_path, there, monkeypatch):
    waits = []
    monkeypatch.setattr(uploader.Pusher, "close", lambda _self, *, wait: waits.append(wait))
    ckpt = Checkpointer(tmp_path / "here", push_to=there.as_uri())
    del ckpt
    assert waits == [False]
