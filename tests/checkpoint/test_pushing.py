"""Show that a trainer's saves reach object storage, also where the pushing process or the trainer dies."""

import errno
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import pytest
from pushed_steps import pushing, state_of, steps_of
from started_ranks import run_program
from waiting import ENDS_S, until
from writer_bench import has_ended

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.catalog.annotations import read_marks
from holdfast.checkpoint.storage import uploader
from holdfast.checkpoint.storage.uploader import PUSHING_MODULE
from holdfast.core.errors import BadUse

pytestmark = pytest.mark.usefixtures("no_pusher_is_left")


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


def test_what_was_pushed_last_does_not_go_for_a_later_step_of_another_run(tmp_path, there):
    url = there.as_uri()
    with Checkpointer(tmp_path / "former", push_to=url) as ckpt:
        ckpt.save(10, state_of(10))
    with Checkpointer(tmp_path / "here", push_to=url, keep_pushed=1) as ckpt:
        ckpt.save(4, state_of(4)).result()
        until(lambda: 4 in steps_of(url))
        ckpt.save(5, state_of(5))
    assert steps_of(url) == [10, 5]


def test_what_nobody_pushed_is_pushed_by_the_next_one_that_restores_it(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state_of(1))
    with Checkpointer(folder, push_to=url) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
    assert steps_of(url) == [1]


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
        assert has_ended(pid)
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
    trainer = run_program(script, folder, url)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    try:
        until(lambda: pushing(folder) == [])
    finally:
        os.kill(int(trainer.stdout), signal.SIGKILL)
    assert steps_of(url)[0] == 2


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
    ended = run_program(script, tmp_path / "here", there.as_uri())
    assert ended.returncode == 0, ended.stderr
    assert "started again" not in ended.stderr
    assert steps_of(there.as_uri()) == [2, 1]


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


def test_one_that_is_dropped_leaves_the_push_to_its_process(tmp_path, there, monkeypatch):
    waits = []
    monkeypatch.setattr(uploader.Pusher, "close", lambda _self, *, wait: waits.append(wait))
    ckpt = Checkpointer(tmp_path / "here", push_to=there.as_uri())
    del ckpt
    assert waits == [False]
