"""Wait for, restart, release and end child processes.

`core.processes` starts a module of Holdfast (`module_command`), and lets the kernel kill a child
whose parent dies (`die_with_parent`). A child that must clean up before its end calls
`await_release` instead. That function reads the child's standard input, which is a pipe from the
parent. One byte (`release`) means that the parent no longer needs the child. The end of the pipe
without a byte means that the parent died.
"""

import contextlib
import math
import os
import select
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


@dataclass(kw_only=True)
class RestartLimit:
    """Limit how often a child that ends is started again.

    Attributes:
        restarts: the most restarts of the child.
        quick_end_s: a child that ran for less time than this, in seconds, ended quickly.
        quick_ends: the number of quick ends in a row after which the child is not restarted,
            because the next start would end quickly as well; 0: no limit.
    """

    restarts: int
    quick_end_s: float = 0.0
    quick_ends: int = 0
    _ends: int = 0
    _quick_ends: int = 0

    @property
    def is_exceeded(self) -> bool:
        """True once the child must not be restarted."""
        return self._ends > self.restarts or 0 < self.quick_ends <= self._quick_ends

    def allows_restart(self, ran_s: float = math.inf) -> bool:
        """Count an end of the child, after `ran_s` seconds; return True if a restart is allowed."""
        self._ends += 1
        self._quick_ends = self._quick_ends + 1 if ran_s < self.quick_end_s else 0
        return not self.is_exceeded


def first_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """Read the line that a child prints when it is ready.

    Returns:
        The line; empty if the child ended or printed nothing for `timeout_s` seconds.
    """
    assert process.stdout is not None, "standard output is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else b""


def release(process: "subprocess.Popen[bytes]") -> None:
    """Send one byte to a child's standard input, which lets the child end, and close the input.

    The function does nothing if the input is closed already or the child has ended.
    """
    assert process.stdin is not None, "standard input is a pipe"
    if process.stdin.closed:
        return
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(b"\n")
        process.stdin.flush()
    with contextlib.suppress(OSError):
        process.stdin.close()


def await_release() -> bool:
    """In a child process, wait until the parent calls `release` or dies.

    Returns:
        True after `release`, False if the parent died.
    """
    # Not sys.stdin: this thread would hold the lock of the stdin buffer at the interpreter's exit,
    # and the interpreter would abort.
    return bool(os.read(0, 1))


def end_within(process: "subprocess.Popen[bytes]", timeout_s: float) -> int:
    """Wait for a child that is about to end, and return its exit code.

    A child that still runs after `timeout_s` seconds is killed with SIGKILL.
    """
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


async def end_soon(process: "asyncio.subprocess.Process", timeout_s: float) -> None:
    """Wait for a child that is about to end.

    The child is killed with SIGKILL after `timeout_s` seconds, or if the caller is cancelled.
    """
    import asyncio

    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout_s)
    finally:
        await _kill(process)


async def answer_of(process: "asyncio.subprocess.Process", question: bytes) -> tuple[bytes, bytes]:
    """Write `question` to a child's standard input, and wait for the child's end.

    If the caller is cancelled, the child is killed.

    Returns:
        The bytes that the child wrote to stdout and to stderr; empty for a stream that is no pipe.
    """
    try:
        out, err = await process.communicate(question)
    finally:
        await _kill(process)
    return out or b"", err or b""


async def _kill(process: "asyncio.subprocess.Process") -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
