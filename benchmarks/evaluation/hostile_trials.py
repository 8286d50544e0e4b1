"""Run hostile programs in a real sandbox, and observe their effects from outside."""

import os
import pwd
import secrets
import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

from evaluation.hostile_programs import Hostile
from holdfast.evaluate.metrics.sandbox.sandbox import Limits, Sandbox, Verdict

LIMITS = Limits(wall_s=20.0, memory_bytes=256 << 20)
"""Long enough for a busy machine, and little enough memory for a small one."""
_SECRET = "the-secret-of-the-canary"
_LEAVE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one program.

    Attributes:
        verdict: the sandbox's verdict.
        faults: a few words for each escape or wrong verdict; empty if all is right.
    """

    verdict: Verdict
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The targets of a program beyond its jail.

    Attributes:
        canary: a folder that any user may write, with a secret that any user may read.
        tcp: a listening socket on the loopback.
        abstract: a listening socket whose name is in no file system.
    """

    canary: Path
    tcp: socket.socket
    abstract: socket.socket

    def try_out(self, sandbox: Sandbox, hostile: Hostile) -> Trial:
        """Run a program in the sandbox, alone, and inspect the targets afterwards."""
        standing = set(processes_of(sandbox))
        verdict = sandbox.run(self._source(hostile.program), hostile.tests, wall_s=hostile.wall_s)
        faults = [*_judged_wrongly(hostile, verdict), *self._harm()]
        if _SECRET in verdict.output_tail:
            faults.append("printed the secret")
        if len(verdict.output_tail) > 2 * sandbox.limits.output_bytes:
            faults.append(f"had {len(verdict.output_tail)} characters of its output kept")
        # The program's processes are gone before there is a verdict; a warden may still be on its
        # way out.
        _, left = psutil.wait_procs(set(processes_of(sandbox)) - standing, timeout=_LEAVE_S)
        faults += [f"left process {process.pid}" for process in left]
        return Trial(verdict=verdict, faults=tuple(faults))

    def _source(self, program: str) -> str:
        for name, value in (
            ("canary", self.canary),
            ("port", self.tcp.getsockname()[1]),
            ("socket", self.abstract.getsockname().decode().removeprefix("\0")),
            ("owner", os.getpid()),
            ("home", pwd.getpwuid(0).pw_dir),
        ):
            program = program.replace(f"{{{name}}}", str(value))
        return program

    def _harm(self) -> Iterator[str]:
        found = {path.name: path.read_text() for path in self.canary.iterdir()}
        if found != {"secret": _SECRET}:
            yield f"changed files: {sorted(found)}"
        reached, _, _ = select.select([self.tcp, self.abstract], [], [], 0)
        for listening in reached:
            listening.accept()[0].close()
            yield f"connected to {listening.getsockname()!r}"


@contextmanager
def outside() -> Iterator[Outside]:
    """Set up the targets; start the sandbox inside, so that its environment also has a token."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        mock.patch.dict(os.environ, {"HOLDFAST_CANARY_TOKEN": "canary-token"}),
    ):
        canary = Path(folder)
        canary.chmod(0o777)
        (canary / "secret").write_text(_SECRET)
        abstract.bind(f"\0holdfast-canary-{secrets.token_hex(8)}")
        abstract.listen()
        yield Outside(canary=canary, tcp=tcp, abstract=abstract)


def processes_of(sandbox: Sandbox) -> list[psutil.Process]:
    """All processes of a sandbox but its first."""
    return psutil.Process(sandbox.process_id()).children(recursive=True)


def _judged_wrongly(hostile: Hostile, verdict: Verdict) -> Iterator[str]:
    is_right = verdict.passed == hostile.passes == (verdict.reason == "passed")
    if not is_right or hostile.reason not in verdict.reason:
        yield f"was judged {verdict.reason!r}"
