"""Copies of this process in place of new processes, which would import torch for seconds each."""

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.processes import kill_descendants
from holdfast.core.sockets import free_ports

SHARED = ("torch._dynamo", "holdfast.checkpoint.checkpointer")
"""Modules that nearly every copy needs: torch's optimizers import the first one."""


class Fork:
    """A copy of this process that makes one call; it has the methods of `Popen` that are used here."""

    def __init__(self, call: Callable[[], None], folder: Path, more: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # else the copy would print the buffered text a second time
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_job(folder, more)
                call()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process lives."""
        return self._wait(os.WNOHANG)

    def wait(self) -> None:
        """Wait for the end of the process."""
        self._wait(0)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Forks:
    """The ranks of a job without a launcher, which ends with its first rank that ends."""

    def __init__(self, ranks: list[Fork]) -> None:
        self._ranks = ranks

    @property
    def returncode(self) -> int | None:
        """The exit code of the first rank that ended; None while all live."""
        return next((code for one in self._ranks if (code := one.poll()) is not None), None)

    def poll(self) -> int | None:
        """Return the exit code of the first rank that ended; None while all live."""
        return self.returncode

    def wait(self) -> None:
        """Wait for the end of all ranks."""
        for one in self._ranks:
            one.wait()

    def kill(self) -> None:
        """Send SIGKILL to all ranks."""
        for one in self._ranks:
            one.kill()


@contextmanager
def forked(
    call: Callable[[], None], folder: Path, environment: Mapping[str, str], *, ranks: int
) -> Iterator[Forks]:
    """Make a call in copies of this process; in the end kill every process below this one.

    Args:
        call: the call; a copy ends when the call returns.
        folder: the working folder, with the output.
        environment: further variables of each copy.
        ranks: the size of the process group that the copies can form; 0 for one copy and no group.
    """
    for name in SHARED:
        importlib.import_module(name)
    port = str(free_ports(1)[0])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    own = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    found = Forks([Fork(call, folder, {**environment, **one}) for one in own])
    try:
        yield found
    finally:
        kill_descendants()
        found.wait()


def _become_job(folder: Path, more: Mapping[str, str]) -> None:
    """Give a new copy the session, the output, the folders and the one thread that a job has."""
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(more, HOLDFAST_HOME=str(folder / ".holdfast"))
    os.chdir(folder)
    tempfile.tempdir = None
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
