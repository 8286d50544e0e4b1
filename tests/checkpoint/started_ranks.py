"""Processes that are the ranks of one job."""

import subprocess
import sys


def run(script, folder, world_size, *scenarios, ends=None):
    """Return the outputs of ranks that went through scenarios, each of which checks itself; `ends`: the exit codes."""

    def start(rank):
        command = [sys.executable, script, folder, str(rank), str(world_size), *scenarios]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    processes = [start(rank) for rank in range(world_size)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == (ends or [0] * world_size), "\n".join(
        outputs
    )
    return outputs
