"""Start the ranks of one job: one process imports torch once, then forks a process per rank.

As a program: `started_ranks.py WORLD_SIZE OUTPUTS SCRIPT ARGUMENT…` runs SCRIPT as `__main__` in each rank, where the
argument RANK stands for the rank's number. Rank N writes to OUTPUTS/N; the exit codes are printed as JSON.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = "RANK"
LONG_S = 600


def run_ranks(world_size, script, *arguments, ends=None):
    """Return the outputs of ranks that ran `script`; `ends`: their exit codes, else all 0."""
    with tempfile.TemporaryDirectory() as outputs:
        command = [sys.executable, __file__, str(world_size), outputs, script, *arguments]
        job = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            found = job.communicate(timeout=LONG_S)[0]
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        told = [(Path(outputs) / str(rank)).read_text() for rank in range(world_size)]
    assert json.loads(found) == (ends or [0] * world_size), "\n".join(told)
    return told


def run(script, folder, world_size, *scenarios, ends=None):
    """Return the outputs of ranks that went through scenarios, each of which checks itself."""
    return run_ranks(world_size, script, folder, RANK, world_size, *scenarios, ends=ends)


def _rank(number, output, script, arguments):
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *(str(number) if each == RANK else each for each in arguments)]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _main(world_size, outputs, script, *arguments):
    # What each rank would import by itself; an optimizer's step imports torch._dynamo.

    import holdfast.checkpoint.checkpointer  # noqa: F401

    ranks = []
    for number in range(int(world_size)):
        if (pid := os.fork()) == 0:
            return _rank(number, Path(outputs) / str(number), script, arguments)
        ranks.append(pid)
    sys.stdout.write(
        json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])
    )
    return None


if __name__ == "__main__":
    _main(*sys.argv[1:])
