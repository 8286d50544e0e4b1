"""Programs of the laboratory that really run."""

import contextlib
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from failure_lab.place import MARK, CannotRun, command
from failure_lab.program import Program
from failure_lab.programs import PROGRAMS
from failure_lab.record import record, root_lines
from failure_lab.run import run
from holdfast.testing.s3 import serve


def program(**given):
    return Program(
        **{
            "id": "x",
            "reason": "Others",
            "cause": "c",
            "root": "r",
            "dialect": None,
            "launcher": "python",
            **given,
        }
    )


def test_a_shell_script_without_its_program():
    recording = run(PROGRAMS["file-script-missing"])
    assert recording.exit_code == 2
    assert root_lines(PROGRAMS["file-script-missing"], recording.log) == [2]
    assert recording.ranks == {}


def test_the_place_is_disguised():
    recording = run(
        program(
            script="import os, socket\nprint(os.getcwd(), os.__file__, socket.gethostname())\nraise SystemExit(3)"
        )
    )
    assert recording.exit_code == 3
    for own in ("holdfast", "/tmp/lab-", str(Path(os.__file__).parent)):
        assert own not in recording.log


def test_a_program_that_goes_on_is_ended_with_all_it_started(tmp_path, monkeypatch):
    script = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("waiting", flush=True)
    import time; time.sleep(600)
    """
    real = subprocess.Popen.wait

    def wait(process, timeout=None):
        """Wait until the program has started all, and no longer, instead of for its limit."""
        if timeout != 6:
            return real(process, timeout)
        while not (tmp_path / "console").read_bytes():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return real(process, 0.01)
        return real(process, 0)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    recording = run(program(script=script, limit_s=6), tmp_path)
    assert (recording.timed_out, recording.log) == (True, "waiting\n")
    assert not [one for one in psutil.Process().children(recursive=True) if MARK in one.environ()]


def test_memory_is_bounded():
    recording = run(program(script="bytearray(3 << 30)", memory_bytes=2 << 30))
    assert "MemoryError" in recording.log


def test_a_mount_needs_root(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match="run as root"):
        command(PROGRAMS["os-disk-full-checkpoint"], tmp_path)
    (outcome,) = record([PROGRAMS["os-disk-full-checkpoint"]], tmp_path / "out")
    assert outcome.skipped


@pytest.mark.parametrize(("bucket", "status"), [("denied", 403), ("empty", 404), ("slow", 503)])
def test_the_storage_refuses_as_its_bucket_says(bucket, status):
    with serve() as url, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/{bucket}/key", timeout=240)
    caught.value.close()
    assert caught.value.code == status


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataloader-worker-killed", "nvlink-xid74", "s3-upload-denied"])
def test_programs_fail_as_they_should(name, tmp_path):
    (outcome,) = record([PROGRAMS[name]], tmp_path)
    assert outcome.problem is None
    assert (tmp_path / "clean" / f"{name}.log").exists()
