"""A command on a leash: when whoever wanted it is gone, however it went, so is the command, with its descendants.

`python -m holdfast.cluster.leash LINGER_S OWNER ARGV…` runs the command and ends as it ends. The leash is this
process's standard input, a pipe whose other end only the caller holds. A byte in it says that the command is not
wanted any more; its end without a byte, which the kernel sees to, that the caller died. Then, for a caller that died
`LINGER_S` seconds later, everything that the command started is killed, also what left its session or lost its parent.
Killing the leash itself does the same at once.

Where the caller acts for another process, as an actor of Ray does, OWNER is the address of that one's `sign_of_life`;
else it is empty. What the caller left alone then lingers only if the owner died too.
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

_CANNOT_START = 127  # what a shell says of a command it cannot find
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
    """Start the command, in a session of its own, its output to `log`; `release` ends it early.

    If this process dies, and the owner too where one is named, the command has `linger_s` to end by itself.
    """
    with log.open("ab" if append else "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cluster.leash", str(linger_s), owner, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=working_folder,
            start_new_session=True,  # Ctrl-C reaches the caller alone, who decides
        )


def release(leashed: subprocess.Popen[bytes]) -> int:
    """End a leashed command and its descendants if it still runs; returns its exit code."""
    child_process.release(leashed)
    # Longer only where something in it is stuck in the kernel.
    return child_process.end_within(leashed, _RELEASE_TIMEOUT_S)


def release_all(leashed: Iterable[subprocess.Popen[bytes]]) -> None:
    """End several, side by side."""
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
    """Run the command to its end; returns its exit code, negative for a signal."""
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
    """An address that takes connections for as long as this process lives, and neither reads nor answers.

    Whoever can connect knows that it lives. The kernel does it all: nobody accepts.

    Raises:
        OSError: the host is no address of this machine.
    """
    with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as server:
        port = server.getsockname()[1]
        server.detach()  # from here on the kernel alone closes it
    return f"{host}:{port}"


def main(linger_s: float, owner: str, command: Sequence[str]) -> None:
    """Run the command and end as it ends; end it when standard input says so, or some time after that closed."""
    # Two processes: whoever kills the first (Ray does with the children of a worker that it ends, the kernel when
    # memory runs out) leaves the second, which no caller knows, to sweep.
    if guard := os.fork():
        _, status = os.waitpid(guard, 0)
        exit_as(os.waitstatus_to_exitcode(status))
    os.setsid()
    become_subreaper()
    try:
        # Safe with one thread. Only for this process being killed itself, which skips the sweep.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509
    except OSError as error:
        print(f"holdfast: cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201  into the log
        sys.exit(_CANNOT_START)
    # After the start, or the sweep could come before the child.
    threading.Thread(target=_end_when_released, args=(linger_s, owner), daemon=True).start()
    exit_code = child.wait()
    kill_descendants()  # what it left in the background would else go on without anybody
    exit_as(exit_code)


def _end_when_released(linger_s: float, owner: str) -> None:
    if not child_process.await_release() and not (owner and _lives(owner)):
        time.sleep(linger_s)
    kill_descendants()  # the main thread then sees its child end


def _lives(owner: str) -> bool:
    host, _, port = owner.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_OWNER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
