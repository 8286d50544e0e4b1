"""Stands between PyTorch's launcher and one rank's process.

torchrun starts this in place of Python (`PYTHON_EXEC`, or `--no-python` in front of any command); it starts the
rank's real command as its child, keeps what that prints in a bounded log, says exactly how it ended, and then ends
in the same way, so that the launcher notices no difference. It sends its rank SIGTERM where the supervisor asks for
that; the launcher's own SIGTERM is blocked (see `guard`). It imports neither torch nor psutil: it costs some
10 MB and 50 ms a rank.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from holdfast.core.errors import ChannelError
from holdfast.core.processes import die_with_parent, exit_as
from holdfast.core.rotating_log import RotatingLog
from holdfast.recover.channel import ENV_ADDRESS, ENV_TOKEN, ChannelClient, Peer

ENV_LOGS = "HOLDFAST_LOGS"
ENV_LOG_MAX_BYTES = "HOLDFAST_LOG_MAX_BYTES"
ENV_ECHO = "HOLDFAST_ECHO"
ENV_PYTHON = "HOLDFAST_PYTHON"
ENV_PYTHON_EXEC = "PYTHON_EXEC"
"""torchrun's own variable: the program it starts in place of its Python."""

CHUNK_BYTES = 256 * 1024
DRAIN_S = 1.0
"""How long to go on reading after the rank ended, when a child of its own still holds the pipe."""
ECHO_BYTES = 8 * 1024 * 1024
"""So much may wait for the terminal; a blocked terminal must not block training."""


def main() -> None:
    """Run the command in `sys.argv`; torchrun's own form is `-u script …` or `-u -m module …`."""
    die_with_parent()
    arguments = sys.argv[1:]
    # Python's own options come first only where torchrun takes this program for its Python.
    python = [os.environ.get(ENV_PYTHON, sys.executable)] if arguments[0].startswith("-") else []
    command = [*python, *arguments]
    peer = Peer.of_this_process("shim")
    try:
        client = ChannelClient(os.environ[ENV_ADDRESS], os.environ[ENV_TOKEN], peer)
    except (KeyError, ChannelError) as error:
        sys.exit(f"holdfast: this process is started by `holdfast run` only ({error}).")
    log = RotatingLog(
        Path(os.environ[ENV_LOGS]) / f"rank-{peer.rank}.log",
        max_bytes=int(os.environ[ENV_LOG_MAX_BYTES]),
    )
    returncode = _run(command, peer, client, log)
    log.close()
    exit_as(returncode)


def _run(command: list[str], peer: Peer, client: ChannelClient, log: RotatingLog) -> int:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop(ENV_PYTHON_EXEC, None)  # a torchrun that the rank itself may start is not ours
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_begin_rank,  # noqa: PLW1509 - no thread runs yet
        )
    except OSError as error:
        log.write(f"holdfast: cannot start {command[0]}: {error}\n".encode())
        return 127
    signal.signal(signal.SIGINT, lambda received, _frame: child.send_signal(received))
    threading.Thread(target=_obey, args=(client, child), daemon=True).start()
    _tell(client, {"kind": "started", "pid": child.pid})
    assert child.stdout is not None
    echo = _Echo(peer) if os.environ.get(ENV_ECHO) == "1" else None
    reader = threading.Thread(target=_keep, args=(child.stdout, log, echo), daemon=True)
    reader.start()
    returncode = child.wait()
    ended_at_s = time.monotonic()
    reader.join(DRAIN_S)
    _tell(
        client,
        {
            "kind": "exited",
            "pid": child.pid,
            "returncode": returncode,
            "at_monotonic_s": ended_at_s,
            "log_bytes": log.written_bytes,
            "log_dropped_bytes": log.dropped_bytes,
        },
    )
    if echo is not None:
        echo.finish()
    return returncode


def _begin_rank() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the guard blocked it


def _obey(client: ChannelClient, child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        while (message := client.receive()) is not None:
            if message["kind"] == "terminate":
                child.terminate()


def _tell(client: ChannelClient, message: dict[str, object]) -> None:
    try:
        client.send(message)
    except OSError:
        # The supervisor is gone; the guard ends this process next.
        return


def _keep(stream: IO[bytes], log: RotatingLog, echo: "_Echo | None") -> None:
    while chunk := os.read(stream.fileno(), CHUNK_BYTES):
        log.write(chunk)
        if echo is not None:
            echo.put(chunk)


class _Echo:
    """Shows a rank's lines on the launcher's standard output, dropping what the terminal does not take."""

    def __init__(self, peer: Peer) -> None:
        self._prefix = f"[rank{peer.rank}] ".encode() if peer.world_size > 1 else b""
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._put_bytes = self._shown_bytes = 0
        self._rest = b""
        self._dropped = 0
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def put(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > CHUNK_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if self._put_bytes - self._shown_bytes > ECHO_BYTES:
                self._dropped += 1
                continue
            shown = self._prefix + line + b"\n"
            self._put_bytes += len(shown)
            self._waiting.put(shown)

    def finish(self) -> None:
        if self._rest:
            self.put(b"\n")
        self._waiting.put(None)
        self._thread.join(DRAIN_S)

    def _show(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._shown_bytes += len(line)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = (
                    self._prefix
                    + b"holdfast: %d lines not shown; see `holdfast logs`\n" % dropped
                    + line
                )
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:
                return  # the terminal was closed; the log goes on


if __name__ == "__main__":
    main()
