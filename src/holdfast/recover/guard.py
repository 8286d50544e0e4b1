"""Stands between the supervisor and PyTorch's launcher, so that no process of a job outlives its supervisor.

It adopts every orphan below it, and kills all of them when the launcher ends, and when its standard input does:
the supervisor closed it, or is gone in whatever way. What holds a dead rank's memory for the next attempt it leaves to
the supervisor, with which that ends. The guard keeps what the launcher itself prints on standard error in a
bounded log. While it lives it holds the run's lock, which it inherited.

A scheduler may send SIGTERM to every process of a job. What to do about it is decided by the supervisor: the guard, the
launcher and the shims block the signal, which children inherit, and only a shim unblocks it for its rank.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from holdfast.checkpoint import SNAPSHOT_SERVER_PROCESS_NAME, WRITER_MODULE
from holdfast.core.child_process import await_release
from holdfast.core.processes import become_subreaper, die_with_parent, exit_as, kill_descendants
from holdfast.core.rotating_log import RotatingLog

CHUNK_BYTES = 64 * 1024
WRITING_S = 10.0
"""How long a rank's writing process may go on; storage that hangs must not keep the job from starting again."""


def main() -> None:
    """`guard LOG MAX_BYTES -- LAUNCHER …`: run the launcher, end as it ends."""
    log_path, max_bytes, dashes, *command = sys.argv[1:]
    assert dashes == "--"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    become_subreaper()
    log = RotatingLog(Path(log_path), max_bytes=int(max_bytes))
    try:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread runs yet
        )
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


def _keep(stream: IO[bytes], log: RotatingLog) -> None:
    while chunk := os.read(stream.fileno(), CHUNK_BYTES):
        log.write(chunk)


def _end_with_supervisor() -> None:
    await_release()
    _end_all()


def _end_all() -> None:
    """A snapshot that a dead rank has left is written to its end, and kept: what was copied is not lost with it."""
    kill_descendants(spared=WRITER_MODULE, spared_s=WRITING_S, left=SNAPSHOT_SERVER_PROCESS_NAME)


if __name__ == "__main__":
    main()
