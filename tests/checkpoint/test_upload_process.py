"""Show what the pushing process pushes, tries again and leaves to others, and what it notes."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pushed_steps import flip, pushing, steps_of
from storage_world import SMALL, make_checkpoint
from waiting import until

from holdfast.checkpoint import scan
from holdfast.checkpoint.catalog import staging_dir
from holdfast.checkpoint.catalog.annotations import note_damaged, read_marks
from holdfast.checkpoint.catalog.staging_dir import Staging, has_unfinished
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage import push as push_module
from holdfast.checkpoint.storage import push as remote_push
from holdfast.checkpoint.storage import upload_process
from holdfast.checkpoint.storage.push import note_pushed, pushed_names
from holdfast.checkpoint.storage.remote import Remote
from holdfast.checkpoint.storage.uploader import PUSHING_MODULE
from holdfast.core.errors import StorageFailed
from holdfast.core.sockets import readable
from holdfast.testing import FakeClock

pytestmark = pytest.mark.usefixtures("no_pusher_is_left")


@pytest.fixture
def ended(monkeypatch):
    """Make the trainer appear to have ended."""
    monkeypatch.setattr(upload_process.Pushing, "_has_ended", lambda *_: True)


def run_pushing(folder, url, **settings):
    settings = {"trainer_pid": 1, "keep": None, "give_up_s": 60, **settings}
    return upload_process.Pushing(folder, Remote(url), **settings).run()


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


def test_what_a_dead_trainer_had_ordered_may_begin_a_little_later(tmp_path, there, monkeypatch):
    """The writing process may have other work first."""
    (tmp_path / "here").mkdir()
    made, clock = make_checkpoint(tmp_path / "made", 1), FakeClock()

    def sleep(seconds):
        clock.advance(seconds)
        if clock.monotonic_s() > 4 and made.exists():
            made.rename(tmp_path / "here" / made.name)

    times = SimpleNamespace(sleep=sleep, monotonic=clock.monotonic_s, time=time.time)
    monkeypatch.setattr(upload_process, "time", times)
    monkeypatch.setattr(upload_process, "_release", lambda *_: None)
    line, trainers_end = os.pipe()
    with (
        os.fdopen(line) as stdin,
        subprocess.Popen(["sleep", "600"], pass_fds=[trainers_end]) as trainer,
    ):
        os.close(trainers_end)
        monkeypatch.setattr(sys, "stdin", stdin)
        pushing = upload_process.Pushing(
            tmp_path / "here",
            Remote(there.as_uri()),
            trainer_pid=trainer.pid,
            keep=None,
            give_up_s=60,
        )
        trainer.kill()
        assert pushing.run() == 0
    assert not made.exists()
    assert steps_of(there.as_uri()) == [1]


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
    monkeypatch.setattr(push_module, "_MAX_NAMES", 2)
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
    assert "cannot be read" in caplog.text


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
    assert caplog.text.count("cannot be recorded in") == 1


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
    assert "cannot be listed yet: [Errno 5] Input/output error" in caplog.text
    assert caplog.text.count("cannot be listed yet") == 1
