"""End every process of a private Slurm, also if the test that started the Slurm was killed.

A process belongs to the cluster if its environment has the cluster's `SLURM_CONF`. The daemons, the
commands and the tasks of jobs all have this variable; a process tree would lack the steps' daemons,
which have left their parents. The guard runs beside the test as `python -m
holdfast.testing.slurm_guard CONF`. Its standard input is a pipe whose other end only the test
holds. At the end of the pipe, the guard kills the processes by their ids.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil


def end_processes(variables: dict[str, str], *, timeout_s: float = 60.0) -> None:
    """SIGKILL every process that started with all these environment variables, and its descendants.

    This process and its ancestors are spared. The function returns when only zombies are left.

    Raises:
        TimeoutError: a process is alive after `timeout_s` seconds, stuck in the kernel.
    """
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    deadline_s = time.monotonic() + timeout_s
    # Listed anew each round: a process may fork between being seen and being killed.
    while victims := _marked(wanted, spared):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes {sorted(victim.pid for victim in victims)} do not end")
        # All are stopped before the first is killed: a process that sees another end may react, as
        # a node's srun does, which cancels its step. Descendants are killed before their ancestors:
        # after the end of a process, the kernel continues stopped processes in a group that becomes
        # orphaned (setpgid(2)).
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
