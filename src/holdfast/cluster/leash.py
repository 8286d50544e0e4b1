"""A command on a leash: when whoever wanted it is gone, however it went, so is the command, with its descendants.

`python -m holdfast.cluster.leash LINGER_S ARGV…` runs the command and ends as it ends. The leash is this process's
standard input, a pipe whose other end only the caller holds. A byte in it says that the command is not wanted any more;
its end without a byte, which the kernel sees to, that the caller died. Then, for a caller that died `LINGER_S` seconds
later, everything that the command started is killed, also what left its session or lost its parent. Killing the leash
itself does the same at once.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from holdfast.core.processes import become_subreaper, die_with_parent, exit_as, kill_descendants

_NOT_WANTED = b"."
_CANNOT_START = 127  # what a shell says of a command it cannot find
_RELEASE_TIMEOUT_S = 15.0  # longer than kill_descendants takes to give up


def start_on_leash(
    command: Sequence[str],
    log: Path,
    *,
    append: bool = False,
    environment: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
    linger_s: float = 0.0,
) -> subprocess.Popen[bytes]:
    """Start the command, in a session of its own, its output to `log`; `release` ends it early.

    If this process dies, the command has `linger_s` to end by itself.
    """
    with log.open("ab" if append else "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cluster.leash", str(linger_s), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=working_folder,
            start_new_session=True,  # Ctrl-C reaches the caller alone, who decides
        )


def release(leashed: subprocess.Popen[bytes]) -> int:
    """End a leashed command and its descendants if it still runs; returns its exit code."""
    _let_go(leashed)
    try:
        return leashed.wait(_RELEASE_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # something in it is stuck in the kernel
        leashed.kill()
        return leashed.wait()


def release_all(leashed: Iterable[subprocess.Popen[bytes]]) -> None:
    """End several, side by side."""
    leashed = list(leashed)
    for each in leashed:
        _let_go(each)
    for each in leashed:
        release(each)


def _let_go(leashed: subprocess.Popen[bytes]) -> None:
    assert leashed.stdin is not None
    if not leashed.stdin.closed:
        with contextlib.suppress(BrokenPipeError):  # it ended before
            leashed.stdin.write(_NOT_WANTED)
            leashed.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            leashed.stdin.close()


def run_on_leash(
    command: Sequence[str],
    log: Path,
    *,
    append: bool = False,
    environment: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
) -> int:
    """Run the command to its end; returns its exit code, negative for a signal."""
    leashed = start_on_leash(command, log, append=append, environment=environment, working_folder=working_folder)
    try:
        leashed.wait()
    finally:
        exit_code = release(leashed)
    return exit_code


def main(linger_s: float, command: Sequence[str]) -> None:
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
    threading.Thread(target=_end_when_released, args=(linger_s,), daemon=True).start()
    exit_code = child.wait()
    kill_descendants()  # what it left in the background would else go on without anybody
    exit_as(exit_code)


def _end_when_released(linger_s: float) -> None:
    # Not sys.stdin: its buffer's lock would be held at the interpreter's exit, which then aborts.
    if not os.read(0, 1):
        time.sleep(linger_s)
    kill_descendants()  # the main thread then sees its child end


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
