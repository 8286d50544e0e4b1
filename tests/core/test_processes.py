"""Test modules that run in new processes, and the observed activity of processes."""

import os
import site
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import psutil
import pytest

import holdfast
from holdfast.core.processes import activity, module_command, parent_of, process_state

FOUND_IN = str(Path(holdfast.__file__).parents[1])


def test_a_process_finds_the_package_where_this_one_did_and_nothing_in_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "queue.py").write_text("raise SystemExit(7)")
    (python, *safely, _, module), environment = module_command("holdfast.core.words")
    assert module == "holdfast.core.words"
    words = [python, *safely, "-c", "import queue, holdfast; print(holdfast.__file__)"]
    ended = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == holdfast.__file__


def test_what_the_user_has_set_comes_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own:/more")
    assert module_command("holdfast")[1]["PYTHONPATH"] == f"/own:/more:{FOUND_IN}"


def test_an_empty_path_that_the_user_has_set_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":/own::/more:")
    assert module_command("holdfast")[1]["PYTHONPATH"] == f"/own:/more:{FOUND_IN}"


@pytest.mark.parametrize("place", ["getsitepackages", "getusersitepackages"])
def test_no_folder_that_python_takes_packages_from_comes_before_the_standard_library(
    monkeypatch, place
):
    """For example the distribution's, a virtual environment's and the user's packages."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, place, lambda: [FOUND_IN] if place == "getsitepackages" else FOUND_IN)
    assert "PYTHONPATH" not in module_command("holdfast")[1]
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert ("PYTHONPATH" in module_command("holdfast")[1]) == (place == "getusersitepackages")


def test_installed_packages_do_not_come_before_the_standard_library(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": FOUND_IN})
    assert "PYTHONPATH" not in module_command("holdfast")[1]


def fork(tmp_path):
    """Start a process whose child has read a megabyte and used some CPU time."""
    ready = tmp_path / "ready"
    child = f"""
import time
open('/dev/zero', 'rb', buffering=0).read(1 << 20)
while time.process_time() < 0.05: pass
open({str(ready)!r}, 'w').close()
input()
"""
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
    while not ready.exists():
        assert started.poll() is None
    return started


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is read")
def test_the_activity_of_every_rank_takes_one_look_at_the_processes(tmp_path, monkeypatch):
    looked = []
    everything = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda: (looked.append(1), everything())[1])
    with fork(tmp_path) as started:
        own = psutil.Process(started.pid).io_counters()
        found = activity({0: started.pid, 1: os.getpid(), 2: started.pid})
        assert looked == [1]
        assert found[0][1] >= own.read_chars + 2**20
        assert found[2][1] >= own.read_chars + 2**20
        assert found[1][0] >= found[0][0] > 0
        started.communicate(b"\n")
    assert activity({0: started.pid}) == {0: None}


@pytest.mark.parametrize("error", [PermissionError(13, "hidepid"), psutil.AccessDenied(1)])
def test_processes_that_are_hidden_end_nothing(tmp_path, monkeypatch, error):
    def refuse(*_arguments):
        raise error

    monkeypatch.setattr(psutil.Process, "ppid", refuse)
    (cpu_s, _) = activity({0: os.getpid()})[0]
    assert cpu_s > 0
    assert parent_of(os.getpid()) is None
    monkeypatch.setattr(psutil, "process_iter", refuse)
    assert activity({0: os.getpid()}) == {0: None}
    monkeypatch.setattr(psutil.Process, "status", refuse)
    assert process_state(os.getpid()) == "hidden"
    monkeypatch.undo()
    monkeypatch.setattr(psutil.Process, "cpu_times", refuse)
    assert activity({0: os.getpid()}) == {0: None}


def test_requests_to_the_store_are_no_activity_of_the_rank_that_serves_it():
    from torch.distributed import TCPStore

    text = (
        "import sys; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        store, ended = TCPStore("127.0.0.1", int(server.stdout.readline())), threading.Event()
        store.set("key", "value")

        def poll():
            while not ended.wait(0.0005):
                store.get("key")

        polling = threading.Thread(target=poll)
        before = psutil.Process(server.pid).io_counters()
        polling.start()
        found = {activity({0: server.pid})[0][1] for _ in range(100)}
        ended.set()
        polling.join()
        assert psutil.Process(server.pid).io_counters().read_chars > before.read_chars
        assert len(found) == 1
        server.communicate()
