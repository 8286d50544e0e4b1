"""Start a private PostgreSQL server with the installed binaries.

The server listens at a Unix socket in its own folder.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_NUMBERS = itertools.count()


def postgresql_binaries() -> Path | None:
    """Return the folder with the binaries of the newest installed server; None if there is none."""
    found = Path("/usr/lib/postgresql").glob("*/bin")
    return max(found, key=lambda path: int(path.parent.name), default=None)


class PrivatePostgreSQL:
    """A PostgreSQL server that runs until the end of its `with` block."""

    def __init__(self) -> None:
        # The path must be short, because the path of a socket may have at most 107 bytes. A folder
        # of pytest would not do, because other users cannot read it.
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-postgresql-"))
        self.folder.chmod(0o777)

    def __enter__(self) -> Self:
        self._run("initdb", "-U", "holdfast", "--no-sync", "-E", "UTF8", "--auth=trust")
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        """Start the server, for the first time or after `stop` or `kill`."""
        settings = (
            f"-c listen_addresses= -c unix_socket_directories={self.folder} -c fsync=off "
            "-c shared_buffers=16MB"
        )
        self._run("pg_ctl", "start", "--wait", "-l", self.folder / "log", "-o", settings)

    def stop(self) -> None:
        """Stop the server, and cut all connections; the databases stay."""
        self._run("pg_ctl", "stop", "--wait", "-m", "fast")

    def kill(self) -> None:
        """Kill the server's processes with SIGKILL, as a power failure would.

        The next `start` recovers the databases.
        """
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        server = psutil.Process(pid)
        # The server's other processes hold its shared memory, and end some time after the server.
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)

    def new_database(self) -> str:
        """Create a database, and return its SQLAlchemy URL."""
        name = f"test{next(_NUMBERS)}"
        self._execute("createdb", "-h", self.folder, "-U", "holdfast", name)
        return f"postgresql+psycopg://holdfast@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: str | Path) -> None:
        self._execute(program, "-D", self.folder / "data", *arguments)

    def _execute(self, program: str, *arguments: str | Path) -> None:
        binaries = postgresql_binaries()
        if binaries is None:
            raise FileNotFoundError("No PostgreSQL server is installed: apt-get install postgresql")
        # The server refuses to run as root.
        user: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        subprocess.run(
            [str(binaries / program), *map(str, arguments)],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "HOME": str(self.folder)},
            cwd=self.folder,
            **(user if os.geteuid() == 0 else {}),
        )
