"""Run all checks of this host, each with a time limit.

A check that hangs or dies does not prevent the other checks.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from holdfast.adopt.doctor.checking import CHECKS
from holdfast.adopt.doctor.findings import Finding, unseen
from holdfast.core.processes import module_command

LIMIT_S: Final = 60.0
"""Seconds that one check may take; importing torch from a shared file system takes the longest."""
_LAST_WAIT_S: Final = 1.0
Command = Callable[[Path, Sequence[str]], tuple[list[str], dict[str, str]]]


class _NoAnswer(Exception):
    """The checking process printed no line; the message states why."""


def examine(
    folder: Path,
    *,
    names: Sequence[str] = tuple(CHECKS),
    limit_s: float = LIMIT_S,
    command: Command | None = None,
) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of each check when the check ends, each with the check's name.

    Args:
        folder: the folder in which the training saves its checkpoints.
        names: the checks to run.
        limit_s: seconds after which the process of a check is killed.
        command: returns the command line and the environment of a process that runs checks, as
            `checking` does; None: `checking` itself.
    """
    left = list(names)
    process: subprocess.Popen[bytes] | None = None
    try:
        while left:
            process = process or _start((command or _checking)(folder, left))
            name = left.pop(0)
            try:
                findings = [Finding(**one) for one in json.loads(_line(process, limit_s))]
            except _NoAnswer as error:
                _end(process)
                process = None  # the next check starts a new process
                findings = [unseen(f"The check {error}.")]
            yield from ((name, finding) for finding in findings)
    finally:
        if process is not None:
            _end(process)


def _checking(folder: Path, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    command, environment = module_command("holdfast.adopt.doctor.checking")
    return [*command, str(folder), *names], environment


def _start(command: tuple[list[str], dict[str, str]]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command[0],
        env=command[1],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # a process group for the checks and their commands
    )


def _line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    assert process.stdout is not None
    line, deadline_s = b"", time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([process.stdout], [], [], left_s)[0]:
            raise _NoAnswer(f"did not end within {limit_s:g} s")
        # One byte a read: the next line belongs to the next check.
        if not (byte := os.read(process.stdout.fileno(), 1)):
            raise _NoAnswer("ended its process")
        line += byte
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that is blocked in the kernel ends later; do not wait for this end.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WAIT_S)
    assert process.stdout is not None
    process.stdout.close()
