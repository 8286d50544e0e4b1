"""End every process of a private Slurm, even if the test that started the Slurm was killed.

A process belongs to the cluster if its environment contains the cluster's `SLURM_CONF`, as for all
daemons, commands and tasks of jobs. The tree of child processes would not be enough, because the
daemons of job steps leave their parents. The guard runs beside the test as `python -m
holdfast.testing.slurm_guard CONF`. Its standard input is a pipe whose other end only the test
holds. When the pipe ends, the guard kills the processes by their ids.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil


def end_processes(variables: dict[str, str], *, timeout_s: float = 60.0) -> None:
    """Kill every process whose initial environment has all these variables, with its descendants.

    The signal is SIGKILL. This process and its ancestors are spared. The function returns when only
    zombies are left.

    Raises:
        TimeoutError: a process is still alive after `timeout_s` seconds, because it is stuck in the
            kernel.
    """
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    deadline_s = time.monotonic() + timeout_s
    # Listed anew each round: a process may fork between being seen and being killed.
    while victims := _marked(wanted, spared):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes {sorted(victim.pid for victim in victims)} do not end")
        # All processes are stopped before the first is killed, because a process may react to the
        # end of another: srun on a node cancels its step. Descendants are killed before their
        # ancestors, because the end of a process may orphan a process group, and the kernel
        # continues the stopped processes of an orphaned group (setpgid(2)).
        for victim in victims:
            _send(signal.SIGSTOP, victim)
        for victim in sorted(victims, key=_depth, reverse=True):
            _send(signal.SIGKILL, victim)
        time.sleep(0.02)


def _marked(wanted: set[bytes], spared: set[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in psutil.pids():
        if pid in spared:
            continue
        try:
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                process = psutil.Process(pid)
                found |= {process, *process.children(recursive=True)}
        except (OSError, psutil.NoSuchProcess):  # the process ended, or belongs to another user
            continue
    return {process for process in found if process.pid not in spared and _lives(process)}


def _send(number: signal.Signals, process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _depth(process: psutil.Process) -> int:
    try:
        return len(process.parents())
    except psutil.NoSuchProcess:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_processes({"SLURM_CONF": sys.argv[1]})
