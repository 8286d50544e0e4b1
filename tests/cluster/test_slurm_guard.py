"""Test the guard of the private Slurm, without a Slurm."""

import subprocess
import sys

from cluster_tasks import await_true, none_lives

from holdfast.testing.slurm_guard import end_processes

# A chain of processes, as below a node's step daemon. The middle process is srun, in its own
# process group. The last process is srun's shepherd, which reports the end of srun, and ignores the
# signals to an orphaned process group.
_CHAIN = """
import os, pathlib, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
os.setsid()
if not os.fork():
    os.setpgid(0, 0)
    reads, writes = os.pipe()
    if not os.fork():
        os.close(writes)
        (folder / "pid.new").write_text(str(os.getpid()))
        (folder / "pid.new").rename(folder / "pid")
        os.read(reads, 1)
        (folder / "told").touch()
while True:
    signal.pause()
"""


def test_no_process_lives_to_tell_of_another_s_end(tmp_path):
    mark = {"HOLDFAST_GUARD_TEST": str(tmp_path)}
    folders = [tmp_path / str(index) for index in range(12)]
    chains = []
    try:
        for folder in folders:
            folder.mkdir()
            chains.append(subprocess.Popen([sys.executable, "-c", _CHAIN, str(folder)], env=mark))
        await_true(lambda: all((folder / "pid").exists() for folder in folders))
        end_processes(mark)
        assert none_lives(int((folder / "pid").read_text()) for folder in folders)
        assert [folder.name for folder in folders if (folder / "told").exists()] == []
    finally:
        for chain in chains:
            chain.kill()
            chain.wait()


def test_a_process_without_every_mark_is_left_alone(tmp_path):
    mark = {"HOLDFAST_GUARD_TEST": str(tmp_path)}
    with subprocess.Popen(["sleep", "600"], env=mark) as other:
        try:
            end_processes({**mark, "HOLDFAST_SLURM_NODE": "n1"})
            assert not none_lives([other.pid])
        finally:
            other.kill()
