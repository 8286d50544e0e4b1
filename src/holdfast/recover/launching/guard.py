"""Run PyTorch's launcher such that no process of a job outlives the node's process.

The guard becomes the parent of all orphaned processes below it. It kills all of them when the
launcher ends. It also kills them when its own standard input ends, which means that the node's
process has closed this input or is gone. The guard spares the snapshot server, which holds a dead
rank's memory for the next attempt, and ends with the node's process. What the launcher itself
writes to standard error is kept in a log of limited size. While the guard lives, it holds the run's
lock, which it has inherited.

A scheduler may send SIGTERM to every process of a job, but the supervisor must decide how to react.
So the guard, the launcher and the shims block the signal, and their children inherit this. Only a
shim unblocks the signal, for its rank.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from holdfast.checkpoint import SNAPSHOT_SERVER_PROCESS_NAME, WRITER_MODULE
from holdfast.core.child_process import await_release
from holdfast.core.processes import become_subreaper, die_with_parent, exit_as, kill_descendants
from holdfast.core.rotating_log import RotatingLog
from holdfast.recover.launching.warm_launcher import (
    COMMAND,
    launcher_arguments,
    order_of,
    read_line,
)

CHUNK_BYTES = 64 * 1024
WRITING_S = 10.0
"""The seconds for which a rank's writing process may continue. The time is limited so that storage
that hangs does not block a restart.
"""


STANDBY = "--standby"


def main() -> None:
    """Run the command `guard LOG MAX_BYTES -- LAUNCHER …`: run the launcher, and end as it ends.

    `guard --standby` starts a warm launcher, and later reads these arguments and the environment
    from standard input.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    become_subreaper()
    words, warm = sys.argv[1:], None
    if words == [STANDBY]:
        warm = _popen(COMMAND, stdin=subprocess.PIPE)
        line = read_line(0)
        if line is None:
            _end_all()
            return
        order = json.loads(line)
        words = order["words"]
        os.environ.clear()
        os.environ.update(order["environment"])
    log_path, max_bytes, dashes, *command = words
    assert dashes == "--"
    log = RotatingLog(Path(log_path), max_bytes=int(max_bytes))
    try:
        launcher = _turned_into(warm, command) or _popen(command)
    except OSError as error:
        log.write(f"holdfast: cannot start {command[0]}: {error}\n".encode())
        sys.exit(127)
    assert launcher.stderr is not None
    reader = threading.Thread(target=_keep, args=(launcher.stderr, log), daemon=True)
    reader.start()
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    returncode = launcher.wait()
    _end_all()
    reader.join(1.0)
    exit_as(returncode)


def _popen(command: Sequence[str], stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=stdin,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread runs yet
    )


def _turned_into(
    warm: "subprocess.Popen[bytes] | None", command: Sequence[str]
) -> "subprocess.Popen[bytes] | None":
    """Order a warm launcher to run a command; return None if this is not possible."""
    if warm is None:
        return None
    assert warm.stdin is not None
    arguments = launcher_arguments(command)
    if arguments is not None and warm.poll() is None:
        with contextlib.suppress(BrokenPipeError):
            warm.stdin.write(order_of(arguments, os.environ))
            warm.stdin.close()
            return warm
    warm.kill()
    warm.wait()
    return None


def _keep(stream: IO[bytes], log: RotatingLog) -> None:
    while chunk := os.read(stream.fileno(), CHUNK_BYTES):
        log.write(chunk)


def _end_with_supervisor() -> None:
    await_release()
    _end_all()


def _end_all() -> None:
    """Kill all descendants except the snapshot server.

    A dead rank's writing process may finish its snapshot first, so that no state is lost that was
    already copied.
    """
    kill_descendants(spared=WRITER_MODULE, spared_s=WRITING_S, left=SNAPSHOT_SERVER_PROCESS_NAME)


if __name__ == "__main__":
    main()
