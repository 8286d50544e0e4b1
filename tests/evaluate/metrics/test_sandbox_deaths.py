"""Kill processes of a sandbox, and its owner: no process stays, and no verdict is wrong."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.sandbox import sandbox
from holdfast.evaluate.metrics.sandbox.sandbox import Limits, Sandbox, Verdict

WAITS = "import time\ndef f(): time.sleep(600)\n"
PATIENCE_S = 240


def _until(reached: Callable[[], bool]) -> None:
    """Poll until `reached()`; a hanging test fails by its own limit."""
    limit = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < limit


def _tree(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _asleep(pid: int) -> int:
    """Count the sleeping processes; the others are starting or about to end."""
    try:
        return sum(process.status() == psutil.STATUS_SLEEPING for process in _tree(pid))
    except psutil.NoSuchProcess:
        return 0


def _in_background(
    box: Sandbox, program: str, tests: str
) -> tuple[threading.Thread, list[Verdict]]:
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(box.run(program, tests)))
    thread.start()
    return thread, verdicts


def test_a_killed_owner_takes_everything_with_it() -> None:
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "killed_owner.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        launcher = int(owner.stdout.readline())
        _until(
            lambda: len(_tree(launcher)) >= 6
        )  # forkserver, wardens, tests, the program and its child
        everything = [psutil.Process(launcher), *_tree(launcher)]
        owner.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(everything, timeout=PATIENCE_S)[1]


@pytest.mark.parametrize("whom", ["launcher", "forkserver"])
def test_a_killed_parent_is_replaced_and_the_trial_done_again(whom: str) -> None:
    with Sandbox(1, Limits(wall_s=10.0), packages=False) as box:
        launcher = box.process_id()
        thread, verdicts = _in_background(box, WAITS, "f()\n")
        _until(lambda: len(_tree(launcher)) >= 5)
        everything = [psutil.Process(launcher), *_tree(launcher)]
        everything[0 if whom == "launcher" else 1].kill()
        thread.join()
        assert verdicts[0].reason == "timed out"
        assert box.process_id() != launcher
        assert not psutil.wait_procs(everything[1:], timeout=PATIENCE_S)[1]
        assert box.run("def f(): return 1\n", "assert f() == 1\n").passed


def test_killed_jails_give_no_wrong_verdict() -> None:
    with Sandbox(1, Limits(wall_s=60.0), packages=False) as box:
        launcher = box.process_id()
        for victim in range(1, 5):  # after the forkserver: each of the four processes of a trial
            _until(lambda: len(_tree(launcher)) <= 1)  # the last trial's processes are gone
            thread, verdicts = _in_background(box, WAITS, "f()\n")
            _until(lambda: _asleep(launcher) >= 5)
            sorted(_tree(launcher), key=lambda process: process.pid)[victim].kill()
            thread.join()
            assert not verdicts[0].passed
        assert box.run("def f(): return 1\n", "assert f() == 1\n").passed


def test_many_trials_at_a_time() -> None:
    with Sandbox(4, Limits(wall_s=30.0), packages=False) as box:
        running = [
            _in_background(box, f"def f(): return {n}\n", f"assert f() == {n % 3}\n")
            for n in range(12)
        ]
        for thread, _ in running:
            thread.join()
        assert [verdicts[0].passed for _, verdicts in running] == [n == n % 3 for n in range(12)]


def test_refuses_where_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    with pytest.raises(BadUse, match=r"cannot be run safely on this machine .*needs root"):
        Sandbox(1, namespaces=False)


def test_refuses_slots_out_of_range() -> None:
    with pytest.raises(BadUse, match="1 to 48 slots, not 1000"):
        Sandbox(1000)
