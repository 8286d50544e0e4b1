"""Run several nodes of one run on this machine, for a benchmark that kills and restarts them."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.jobs import HOLDFAST, job
from holdfast.core.sockets import free_ports
from holdfast.testing.hosts import Hosts

TMPFS_MIB = 512
_POSTGRES = sorted(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
)
_AS_NOBODY = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
"""The server refuses to run as root."""


@dataclass
class Nodes:
    """The nodes of the run `r`; the first `trains` nodes train.

    Attributes:
        folder: the working folder of all nodes.
        command: the command of the ranks.
        count: the number of nodes, spares included.
        trains: the number of nodes that train at a time.
        hosts: those named n1, n2, … of the nodes; None: all nodes share this host's addresses.
        options: of `holdfast run`.
        ledger: the URL of the ledger; None: the default.
        environment: of the nodes.
    """

    folder: Path
    command: Sequence[str]
    count: int
    trains: int = 2
    hosts: Hosts | None = None
    options: Sequence[str] = ()
    ledger: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        host = "127.0.0.1" if self.hosts is None else self.hosts.addresses["n1"]
        self._place = f"{host}:{free_ports(1)[0]}"

    def __enter__(self) -> "Nodes":
        for number in range(self.count):
            self.start(number)
            time.sleep(1.0)  # so that the first one is first
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, number: int) -> None:
        """Start a node, or start it again."""
        ledger = () if self.ledger is None else ("--ledger", self.ledger)
        meeting = ("--nnodes", str(self.trains), "--rendezvous", self._place)
        run = ("run", "--name", "r", "--no-echo", *meeting, *self.options, "--", *self.command)
        command = [*HOLDFAST, *ledger, *run]
        name = f"n{number + 1}"
        environment = {**self.environment, "HOLDFAST_NODE_NAME": name}
        if self.hosts is not None:
            command = self.hosts.command(name, command)
            environment |= self.hosts.environment(name)
        started = self._stack.enter_context(job(command, self.folder, environment=environment))
        self.processes[number] = started

    def ended(self) -> list[int]:
        """Return the nodes whose process has ended."""
        return [number for number, one in self.processes.items() if one.poll() is not None]


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder for a run, and delete it in the end."""
    name = tempfile.mkdtemp(prefix="holdfast-nodes-")
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system of its own at `folder`, which needs root."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def can_mount() -> bool:
    """Return whether a file system can be mounted here."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return False
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),
        work_folder() as folder,
        small_disk(folder),
    ):
        return True
    return False


class Postgres:
    """A private PostgreSQL that is killed and started again."""

    def __init__(self) -> None:
        # A path of its own: that of a socket may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        self.url = f"postgresql+psycopg://holdfast@/holdfast?host={self._folder}"

    @staticmethod
    def is_installed() -> bool:
        """Return whether the server is installed."""
        return bool(_POSTGRES)

    def __enter__(self) -> "Postgres":
        self._folder.chmod(0o777)
        self._run("initdb", "-U", "holdfast", "--no-sync", "-E", "UTF8", "--auth=trust")
        self.start()
        create = [_POSTGRES[-1] / "createdb", "-h", self._folder, "-U", "holdfast", "holdfast"]
        subprocess.run(create, check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        settings = f"-c listen_addresses= -c unix_socket_directories={self._folder} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "-l", str(self._folder / "log"), "-o", settings)

    def kill(self) -> None:
        """Kill the server's processes, and wait for their end."""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            first = psutil.Process(
                int((self._folder / "data/postmaster.pid").read_text().split()[0])
            )
            processes = [first, *first.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            # A zombie, which an orphan of a benchmark becomes, keeps a new server from starting.
            psutil.wait_procs(processes, timeout=10)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(_POSTGRES[-1] / program), "-D", str(self._folder / "data"), *arguments]
        environment = {**os.environ, "LC_ALL": "C", "HOME": str(self._folder)}
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self._folder,
            **_AS_NOBODY,
        )
