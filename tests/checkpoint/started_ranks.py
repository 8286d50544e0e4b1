"""Start the ranks of a job as forks of one process per test worker, which has imported torch.

As a program, this module reads jobs from standard input, one JSON object a line, runs the ranks of
each job to their end, and prints their exit codes as JSON. Rank N runs `script` as `__main__` with
the rank's number in place of the argument RANK, and writes to the files `outputs`/N and `errors`/N.
"""

import atexit
import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = "RANK"
LONG_S = 500


def run_ranks(world_size, script, *arguments, ends=None):
    """Run `script` on ranks; check the exit codes (`ends`, or all 0) and return the outputs."""
    with tempfile.TemporaryDirectory() as outputs:
        found = _answer(_job(world_size, script, arguments, outputs=outputs, errors=outputs))
        told = [(Path(outputs) / str(rank)).read_text() for rank in range(world_size)]
    assert found == (ends or [0] * world_size), "\n".join(told)
    return told


def run_program(program, *arguments, in_folder=None):
    """Run a program of one process to its end, with any exit code.

    Args:
        program: the path of a script, or code.
        arguments: the arguments of the program.
        in_folder: the program's working directory; None: the server's.

    Returns:
        A `subprocess.CompletedProcess` with text.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs, errors, code = (Path(folder) / name for name in ("out", "err", "code.py"))
        outputs.mkdir()
        errors.mkdir()
        if isinstance(program, str):
            code.write_text(program)
            program = code
        job = _job(1, program, arguments, outputs=outputs, errors=errors)
        (found,) = _answer(job | {"folder": str(in_folder or ".")})
        out, err = ((each / "0").read_text() for each in (outputs, errors))
    return subprocess.CompletedProcess([program, *arguments], found, out, err)


def run(script, folder, world_size, *scenarios, ends=None):
    """Return the outputs of ranks that ran scenarios, each with its own checks."""
    return run_ranks(world_size, script, folder, RANK, world_size, *scenarios, ends=ends)


def _job(world_size, script, arguments, *, outputs, errors):
    return {
        "world_size": world_size,
        "script": str(script),
        "arguments": list(map(str, arguments)),
        "outputs": str(outputs),
        "errors": str(errors),
        "environment": dict(os.environ),
        "folder": ".",
    }


def _answer(job):
    server = _server()
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    if select.select([server.stdout], [], [], LONG_S)[0] and (line := server.stdout.readline()):
        return json.loads(line)
    _server.cache_clear()
    _end(server)
    raise AssertionError(f"the ranks of {job['script']} did not end in {LONG_S} s")


@functools.cache
def _server():
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server):
    """End the server with all its ranks."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    server.stdin.close()
    server.stdout.close()


def _rank(number, job):
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    for standard, folder in ((1, job["outputs"]), (2, job["errors"])):
        output = os.open(Path(folder) / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, standard)
        os.close(output)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    script = job["script"]
    sys.argv = [script, *(str(number) if each == RANK else each for each in job["arguments"])]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _main():
    # Modules that each rank would import; an optimizer's step imports torch._dynamo.
    import torch._dynamo  # noqa: F401

    import holdfast.checkpoint.checkpointer  # noqa: F401

    while line := sys.stdin.readline():
        job = json.loads(line)
        ranks = []
        for number in range(job["world_size"]):
            if (pid := os.fork()) == 0:
                return _rank(number, job)
            ranks.append(pid)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        sys.stdout.write(json.dumps(ends) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    _main()
