"""The run's lock: one holder, inherited by children, released by death."""

import os
import signal
import subprocess
import sys

import pytest

from holdfast.core.errors import BadUse
from holdfast.recover.run_lock import RunLock, is_alive


def test_one_holder(tmp_path):
    path = tmp_path / "run-1" / "lock"
    assert not is_alive(path)
    lock = RunLock.acquire(path)
    assert is_alive(path)
    with pytest.raises(BadUse, match="run-1 is still going"):
        RunLock.acquire(path)
    lock.release()
    assert not is_alive(path)


def test_a_child_that_inherited_it_keeps_the_run_alive_until_it_is_killed(tmp_path):
    path = tmp_path / "run-1" / "lock"
    lock = RunLock.acquire(path)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fd,)
    )
    lock.release()
    assert is_alive(path)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not is_alive(path)
    RunLock.acquire(path, timeout_s=60).release()
