"""Check that a killed process's remains are removed by the next process, and folders in use are
not.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.trace import trace as module
from holdfast.trace.trace import open_scratch, sweep_scratch

HOLDER = """
import signal, sys
from holdfast.trace.trace import open_scratch
connection, folder = open_scratch(memory_limit_mb=200)
print(folder, flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def held():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (1, 1))
    return process, folder


def test_only_what_nobody_holds_is_swept(temporary):
    living, used = held()
    killed, left = held()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        connection, own = open_scratch(memory_limit_mb=200)
        os.utime(own, (1, 1))
        sweep_scratch()
        assert not left.exists()
        assert (used / "trace.duckdb").exists()
        assert (own / "trace.duckdb").exists()
        assert connection.execute("CREATE TABLE t AS SELECT 1").fetchall()
        connection.close()
    finally:
        for process in (living, killed):
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_scratch_that_is_just_being_made_is_left_alone(temporary):
    young = temporary / f"{module.SCRATCH}1-young"
    young.mkdir()
    (young / "trace.duckdb").touch()
    sweep_scratch()
    assert young.exists()
    os.utime(young, (1, 1))
    sweep_scratch()
    assert not young.exists()
