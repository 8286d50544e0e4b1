"""Run a command that ends, with all its descendants, when its owner ends.

`python -m holdfast.cluster.leash LINGER_S OWNER ARGV…` runs the command, and exits as the command
exits. The leash is this process's standard input: a pipe whose other end only the caller holds. One
byte in the pipe means that the caller releases the command. The end of the pipe without a byte
means that the caller died, and the command first gets `LINGER_S` seconds to end by itself. In both
cases every process that the command started is then killed, also a process that left the session or
lost its parent. Killing the process that holds the leash has the same effect at once.

A caller may act for another process, as an actor of Ray does. Then OWNER is the address that
`sign_of_life` returned in that process. If the caller dies and OWNER is still alive, the command is
killed at once; if both died, the command has its `LINGER_S` seconds. Otherwise OWNER is empty.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from holdfast.core import child_process
from holdfast.core.processes import become_subreaper, die_with_parent, exit_as, kill_descendants

_CANNOT_START = 127  # a shell's exit code for a command that does not exist
_RELEASE_TIMEOUT_S = 15.0  # longer than kill_descendants takes to give up
_OWNER_TIMEOUT_S = 5.0


def start_on_leash(
    command: Sequence[str],
    log: Path,
    *,
    append: bool = False,
    environment: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
    linger_s: float = 0.0,
    owner: str = "",
) -> subprocess.Popen[bytes]:
    """Start the command in its own session, with its output in the file `log`.

    `release` ends the command early. If this process dies, and also the owner if one is named, the
    command has `linger_s` seconds to end by itself.
    """
    with log.open("ab" if append else "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cluster.leash", str(linger_s), owner, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=working_folder,
            start_new_session=True,  # Ctrl-C reaches only the caller, which decides
        )


def release(leashed: subprocess.Popen[bytes]) -> int:
    """End a command on a leash and its descendants, if they still run; return the exit code."""
    child_process.release(leashed)
    # The limit is longer than any kill takes, unless a process is stuck in the kernel.
    return child_process.end_within(leashed, _RELEASE_TIMEOUT_S)


def release_all(leashed: Iterable[subprocess.Popen[bytes]]) -> None:
    """End several commands on leashes at the same time."""
    leashed = list(leashed)
    for each in leashed:
        child_process.release(each)
    for each in leashed:
        release(each)


def run_on_leash(
    command: Sequence[str],
    log: Path,
    *,
    append: bool = False,
    environment: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
) -> int:
    """Run the command to its end; return the exit code, which is negative for a signal."""
    leashed = start_on_leash(
        command, log, append=append, environment=environment, working_folder=working_folder
    )
    try:
        leashed.wait()
    finally:
        exit_code = release(leashed)
    return exit_code


@cache
def sign_of_life(host: str) -> str:
    """Return an address that accepts connections as long as this process is alive.

    Another process can connect to the address to check whether this process is alive. The kernel
    accepts the connections; no code of this process reads or answers them.

    Raises:
        OSError: the host is no address of this machine.
    """
    with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as server:
        port = server.getsockname()[1]
        server.detach()  # only the end of this process closes the socket now
    return f"{host}:{port}"


def main(linger_s: float, owner: str, command: Sequence[str]) -> None:
    """Run the command, and exit as the command exits; kill the command as the leash requires."""
    # Two processes: Ray may kill the first as a child of an ending worker, and the kernel may kill
    # it when memory runs out. Then the second kills the descendants; no caller has its id.
    if guard := os.fork():
        _, status = os.waitpid(guard, 0)
        exit_as(os.waitstatus_to_exitcode(status))
    os.setsid()
    become_subreaper()
    try:
        # `preexec_fn` is safe here, because this process has one thread. If this process itself is
        # killed, it cannot kill the descendants; `die_with_parent` then ends the command.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509
    except OSError as error:
        print(f"holdfast: cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201  into the log
        sys.exit(_CANNOT_START)
    # After the start, so that no release comes before the child exists.
    threading.Thread(target=_end_when_released, args=(linger_s, owner), daemon=True).start()
    exit_code = child.wait()
    kill_descendants()  # processes that the command left running in the background
    exit_as(exit_code)


def _end_when_released(linger_s: float, owner: str) -> None:
    if not child_process.await_release() and not (owner and _lives(owner)):
        time.sleep(linger_s)
    kill_descendants()  # then the main thread's wait for the child returns


def _lives(owner: str) -> bool:
    host, _, port = owner.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_OWNER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
