"""Child processes: read that a child is ready, restart it with a limit, release and end it.

`core.processes` has how a module of Holdfast is started (`module_command`) and how a child ends with its parent in the
kernel's hands (`die_with_parent`). A child that ends in its own way instead reads its standard input, a pipe, in
`await_release`: one byte (`release`) says that the child is not wanted any more, the end of the pipe without a byte
that the parent died.
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
    """Counts the ends of a child that is started again each time.

    Attributes:
        restarts: how often the child may be started again.
        quick_end_s: a child that ran for less has ended quickly.
        quick_ends: quick ends in a row after which the child is given up: what ended it would end the next one.
    """

    restarts: int
    quick_end_s: float = 0.0
    quick_ends: int = 0
    _ends: int = 0
    _quick_ends: int = 0

    @property
    def is_exceeded(self) -> bool:
        """Whether the child is given up."""
        return self._ends > self.restarts or 0 < self.quick_ends <= self._quick_ends

    def allows_restart(self, ran_s: float = math.inf) -> bool:
        """Record that the child ended after `ran_s` seconds; return whether to start it again."""
        self._ends += 1
        self._quick_ends = self._quick_ends + 1 if ran_s < self.quick_end_s else 0
        return not self.is_exceeded


def first_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """Read the line by which a child says that it is ready; empty if the child ended or is silent for `timeout_s`."""
    assert process.stdout is not None, "standard output is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else b""


def release(process: "subprocess.Popen[bytes]") -> None:
    """Send one byte to a child's standard input and close it; do nothing where that is done or the child has ended.

    The end of the pipe alone could stay unseen: another child, forked meanwhile, may hold the pipe open.
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
    """In a child: wait until the parent calls `release` or dies; return whether the parent released this process."""
    # Not sys.stdin: its buffer's lock would be held at the interpreter's exit, which then aborts.
    return bool(os.read(0, 1))


def end_within(process: "subprocess.Popen[bytes]", timeout_s: float) -> int:
    """Wait for a child that is about to end, SIGKILL it after `timeout_s`; return its exit code."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


async def end_soon(process: "asyncio.subprocess.Process", timeout_s: float) -> None:
    """Wait for a child that is about to end; SIGKILL it after `timeout_s`, or when the caller is cancelled."""
    import asyncio

    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout_s)
    finally:
        await _kill(process)


async def answer_of(process: "asyncio.subprocess.Process", question: bytes) -> tuple[bytes, bytes]:
    """Send `question` to a child; return what it printed to standard output and error, each where that is a pipe.

    The child is killed if the caller is cancelled.
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
