"""Test the private Slurm: the features that other tests use, and that no process of it is left."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_tasks import await_true, started

from holdfast.core.errors import BadUse
from holdfast.testing.slurm import PrivateSlurm

pytestmark = pytest.mark.slow  # a whole cluster is started

if reason := PrivateSlurm.missing():
    pytest.skip(reason, allow_module_level=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all living processes that were started with this cluster's SLURM_CONF."""
    marker = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if marker in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue
    return found


def cmdline(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_accounting_tells_of_a_jobs_gpus_and_of_a_node_that_died(tmp_path):
    if reason := PrivateSlurm.missing(accounting=True):
        pytest.skip(reason)
    with PrivateSlurm(tmp_path, nodes=2, gpus_per_node=4, accounting=True) as slurm:
        submit = ["sbatch", "--parsable", "--output=/dev/null", "--gpus-per-node=3"]
        done = slurm.run([*submit, "--wrap=true"]).strip()
        doomed = slurm.run([*submit, "--no-requeue", "--nodelist=n2", "--wrap=sleep 600"]).strip()
        await_true(
            lambda: (
                slurm.run(["squeue", "--noheader", "--format=%i %T %N"]) == f"{doomed} RUNNING n2\n"
            )
        )
        slurm.kill_node("n2")
        slurm.run(["scontrol", "update", "nodename=n2", "state=down", "reason=dead"])
        query = [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            "--format=JobID,State,AllocTRES,NodeList",
        ]
        tres = "billing=1,cpu=1,gres/gpu=3,node=1"
        expected = [f"{done}|COMPLETED|{tres}|n1", f"{doomed}|NODE_FAIL|{tres}|n2"]
        await_true(lambda: slurm.run(query).splitlines() == expected)
        slurm.restart_node("n2")
        assert slurm.run(["srun", "--nodelist=n2", "printenv", "SLURMD_NODENAME"]) == "n2\n"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_test_that_is_killed(tmp_path, number):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom holdfast.testing.slurm import PrivateSlurm\n"
        "with PrivateSlurm(Path(sys.argv[1]), nodes=1) as slurm:\n"
        "    slurm.run(['sbatch', '--output=/dev/null', '--wrap=setsid sleep 600'])\n"
        "    while 'RUNNING' not in slurm.run(['squeue', '--format=%T']): time.sleep(0.05)\n"
        "    print('up', flush=True)\n    time.sleep(600)"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    with started(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"up\n"
        await_true(
            lambda: any(b"sleep\x00600" in cmdline(process) for process in processes_of(tmp_path))
        )
        os.kill(test.pid, number)
        test.wait(timeout=90)
    await_true(lambda: processes_of(tmp_path) == [])


def test_a_daemon_that_does_not_come_up_is_an_error_with_its_words_and_leaves_nothing(
    tmp_path, monkeypatch
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("holdfast.testing.slurm.free_ports", lambda count: [port] * count)
        with pytest.raises(RuntimeError, match="Address already in use"):
            PrivateSlurm(tmp_path, nodes=1).__enter__()
    assert processes_of(tmp_path) == []


def test_what_cannot_be_started_is_refused(tmp_path, monkeypatch):
    with pytest.raises(BadUse, match="too long"):
        PrivateSlurm(tmp_path / ("x" * 100))
    monkeypatch.setattr("holdfast.testing.slurm._SEARCH_PATH", "/nonexistent")
    assert "apt-get install slurmctld slurmd slurm-client" in (PrivateSlurm.missing() or "")
    with pytest.raises(BadUse, match="No slurmctld"):
        PrivateSlurm(tmp_path)
