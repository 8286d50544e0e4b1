"""Run the trainers of one rank, one after the other, below PyTorch's launcher.

torchrun starts the shim in place of Python (`PYTHON_EXEC`, or `--no-python` before any command).
The shim starts the rank's real command as its child, keeps the output in a log of limited size, and
reports how the command ended. Then the supervisor sends `start` or `leave`. After `start`, the shim
starts the trainer of the next attempt, which the launcher does not notice. After `leave`, the shim
ends in the same way as the trainer ended. On the supervisor's order, the shim also sends SIGTERM or
SIGKILL to its trainer. A SIGTERM from the launcher is blocked (see `guard`).

The first trainer is a new interpreter with the user's command. A later trainer is forked from a
warm process, which has imported the modules of the first trainer in advance; if this is not
possible, it is a new interpreter that runs `trainer`.

The shim becomes the parent of all orphaned processes below it. It kills the processes that a
trainer has left, and then reports `swept`. The shim does not import torch.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from holdfast.checkpoint import SNAPSHOT_SERVER_PROCESS_NAME, WRITER_MODULE
from holdfast.core.errors import ChannelError
from holdfast.core.processes import (
    become_subreaper,
    die_with_parent,
    exit_as,
    kill_descendants,
    reap_orphans,
)
from holdfast.core.rotating_log import RotatingLog
from holdfast.recover.channel import ENV_ADDRESS, ENV_TOKEN, ChannelClient, Peer
from holdfast.recover.shim import trainer
from holdfast.recover.shim.gpus import turned
from holdfast.recover.shim.imports import imports_path
from holdfast.recover.shim.script import Script

ENV_LOGS = "HOLDFAST_LOGS"
ENV_LOG_MAX_BYTES = "HOLDFAST_LOG_MAX_BYTES"
ENV_ECHO = "HOLDFAST_ECHO"
ENV_PYTHON = "HOLDFAST_PYTHON"
ENV_PYTHON_EXEC = "PYTHON_EXEC"
"""The environment variable from which torchrun reads the program to run in place of Python."""

CHUNK_BYTES = 256 * 1024
DRAIN_S = 1.0
"""The seconds for which output is read after the rank has ended, if a child of the rank still has
the pipe open."""
ECHO_BYTES = 8 * 1024 * 1024
"""The largest number of bytes that wait for the terminal. Further output is not shown, since a
blocked terminal must not block training.
"""
READY_TIMEOUT_S = 60.0
"""The seconds to wait for the imports of a warm process when it is needed. An import could take
forever.
"""
WRITING_S = 10.0
"""The seconds for which the writing process of a dead trainer may continue. The time is limited so
that storage that hangs does not block the next start of the job."""


def main() -> None:
    """Run the command in `sys.argv`; the form of torchrun is `-u script …` or `-u -m module …`."""
    die_with_parent()
    become_subreaper()
    arguments = sys.argv[1:]
    # Options of Python come first only if torchrun runs this program in place of Python.
    python = [os.environ.get(ENV_PYTHON, sys.executable)] if arguments[0].startswith("-") else []
    command = [*python, *arguments]
    peer = Peer.of_this_process("shim")
    try:
        client = ChannelClient(os.environ[ENV_ADDRESS], os.environ[ENV_TOKEN], peer)
    except (KeyError, ChannelError) as error:
        sys.exit(f"holdfast: this process is started by `holdfast run` only ({error}).")
    exit_as(RankShim(command, peer, client).run())


class Trainer(Protocol):
    """A process that trains."""

    pid: int

    def wait(self) -> tuple[int, float]:
        """Wait until the process ends.

        Returns:
            The return code (negative: the number of a signal), and the time of the end in monotonic
            seconds.
        """
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        ...


class Spawned:
    """A trainer that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.send_signal = process.send_signal

    def wait(self) -> tuple[int, float]:
        """See `Trainer.wait`."""
        return self._process.wait(), time.monotonic()


class Forked:
    """A trainer that a warm process has forked."""

    def __init__(self, warm: "Warm", pid: int, pidfd: int) -> None:
        self._warm = warm
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._closing = threading.Lock()

    def wait(self) -> tuple[int, float]:
        """See `Trainer.wait`. The kernel kills the trainer when the warm process is killed."""
        ended = self._warm.receive()
        with self._closing:
            assert self._pidfd is not None
            os.close(self._pidfd)
            self._pidfd = None
        if ended is None:
            return -signal.SIGKILL, time.monotonic()
        return int(ended["returncode"]), float(ended["at_monotonic_s"])

    def send_signal(self, number: int) -> None:
        """See `Trainer.send_signal`."""
        with self._closing, contextlib.suppress(OSError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)


class Warm:
    """A process that runs `trainer`, with or without modules to import first.

    Its arguments include the rank's command, so that lists of processes show its purpose.
    """

    def __init__(self, command: Sequence[str], imports: Path | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P prevents that files in the working directory are imported in place of packages.
        module = [sys.executable, "-P", "-m", "holdfast.recover.shim.trainer"]
        with theirs:
            self.process = subprocess.Popen(
                [*module, str(theirs.fileno()), str(imports or ""), *command],
                env=_rank_environment(dict(os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._forks: bool | None = None

    def receive(self) -> dict[str, Any] | None:
        """Receive the next message; return None if the process is gone."""
        received = trainer.receive(self._control)
        return None if received is None else received[0]

    def start(
        self, script: Script, environment: dict[str, str], prefix: str, output: int
    ) -> Trainer | None:
        """Wait for the imports, and then start the trainer.

        If this fails, kill the process and return None.
        """
        self._control.settimeout(READY_TIMEOUT_S)
        if self._forks is None and (ready := self.receive()) is not None:
            self._forks = bool(ready["forks"])
        order = {
            "kind": "start",
            "script": script.to_json(),
            "environment": environment,
            "prefix": prefix,
        }
        with contextlib.suppress(OSError):
            trainer.send(self._control, order, output)
        started = trainer.receive(self._control) if self._forks is not None else None
        self._control.settimeout(None)
        if started is None:
            self.end()
            return None
        if self._forks:
            return Forked(self, int(started[0]["pid"]), *started[1])
        self._control.close()
        return Spawned(self.process)

    def end(self) -> None:
        """Kill the process. The kernel then also kills the trainer that the process has forked."""
        self.process.kill()
        self.process.wait()
        self._control.close()

    @property
    def starts_again(self) -> bool:
        """True if another trainer can be started from this process."""
        return bool(self._forks) and self.process.poll() is None


@dataclass
class Attempt:
    """This rank's part in one attempt of the job."""

    number: int
    logs: Path


class RankShim:
    """Run the trainers of one rank, one after the other."""

    def __init__(self, command: list[str], peer: Peer, client: ChannelClient) -> None:
        self._command = command
        self._script = Script.of_command(command)
        self._peer = peer
        self._client = client
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._attempt = Attempt(peer.attempt, Path(os.environ[ENV_LOGS]))
        self._trainer: Trainer | None = None
        self._warm: Warm | None = None
        self._warming = threading.Lock()
        self._sent: list[dict[str, Any]] = []
        """The messages that were sent about the present attempt."""
        self._orders_before_start: int | None = None
        """The last signal that the supervisor has ordered since its last `start`."""

    def run(self) -> int:
        """Run trainers until the order `leave` or the loss of the supervisor; return the last code."""
        log = self._open_log()
        output, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                self._command,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                env=_rank_environment(dict(os.environ)),
                preexec_fn=_begin_rank,  # noqa: PLW1509 - no thread runs yet
            )
        except OSError as error:
            log.write(f"holdfast: cannot start {self._command[0]}: {error}\n".encode())
            log.close()
            return 127
        os.close(theirs)
        signal.signal(signal.SIGINT, self._pass_on)
        threading.Thread(target=self._obey, daemon=True).start()
        returncode = self._watch(Spawned(process), output, log)
        while (order := self._orders.get()) is not None and order["kind"] == "start":
            if int(order["attempt"]) <= self._attempt.number:  # a repeated order, see `supervisor`
                continue
            self._attempt = Attempt(int(order["attempt"]), Path(order["logs"]))
            log = self._open_log()
            output, theirs = os.pipe()
            began = self._start(order, theirs)
            os.close(theirs)
            if began is None:
                log.write(b"holdfast: no interpreter for the trainer starts\n")
                os.close(output)
                return 127
            returncode = self._watch(began, output, log)
        return returncode

    def _open_log(self) -> RotatingLog:
        return RotatingLog(
            self._attempt.logs / f"rank-{self._peer.rank}.log",
            max_bytes=int(os.environ[ENV_LOG_MAX_BYTES]),
        )

    def _start(self, order: dict[str, Any], output: int) -> Trainer | None:
        assert self._script is not None, "the supervisor restarts only launchers that announced it"
        prefix = f"holdfast/{self._attempt.number}"
        environment = {str(name): str(value) for name, value in order["environment"].items()}
        environment |= turned({**os.environ, **environment})
        with self._warming:
            warm, self._warm = self._warm, None
            if warm is not None:
                began = warm.start(self._script, environment, prefix, output)
                if began is not None:
                    self._warm = warm if warm.starts_again else None
                    return began
            return Warm(self._command).start(self._script, environment, prefix, output)

    def _watch(self, began: Trainer, output: int, log: RotatingLog) -> int:
        """Report the start and the end of the trainer, and kill the processes that it leaves."""
        self._trainer = began
        if (number := self._orders_before_start) is not None:
            began.send_signal(number)
        self._send("started", pid=began.pid, starts_again=self._script is not None)
        echo = _Echo(self._peer) if os.environ.get(ENV_ECHO) == "1" else None
        stream = os.fdopen(output, "rb", buffering=0)
        reader = threading.Thread(target=_keep, args=(stream, log, echo), daemon=True)
        reader.start()
        import psutil  # noqa: F401 - for the sweep, before a restart waits for it

        returncode, ended_at_s = began.wait()
        with self._warming:
            self._trainer = (
                None  # from here on nothing may be started, since the sweep would kill it
            )
        self._send("exited", pid=began.pid, returncode=returncode, at_monotonic_s=ended_at_s)
        # If a dead trainer has left a snapshot, its writing is completed, so that the copied state
        # is not lost.
        kill_descendants(
            spared=WRITER_MODULE,
            spared_s=WRITING_S,
            left=SNAPSHOT_SERVER_PROCESS_NAME,
            but=None if self._warm is None else self._warm.process.pid,
        )
        reap_orphans(but=None if self._warm is None else self._warm.process.pid)
        reader.join(DRAIN_S)
        if echo is not None:
            echo.finish()
        self._send("swept", log_dropped_bytes=log.dropped_bytes)
        return returncode

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if (began := self._trainer) is not None:
            began.send_signal(number)

    def _obey(self) -> None:
        while True:
            self._follow_supervisor()
            if not self._client.reconnect(lambda: [{**one, "again": True} for one in self._sent]):
                break
        self._orders.put(None)

    def _follow_supervisor(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._client.receive()) is not None:
                kind, began = message["kind"], self._trainer
                if kind in ("terminate", "kill"):
                    if message.get("attempt", self._attempt.number) != self._attempt.number:
                        continue  # the attempt is over
                    number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
                    self._orders_before_start = number
                    if began is not None:
                        began.send_signal(number)
                elif kind == "warm":
                    with contextlib.suppress(OSError):  # the host has no process or memory to spare
                        self._warm_up()
                elif kind in ("start", "leave"):
                    self._orders_before_start = None
                    self._orders.put(message)

    def _warm_up(self) -> None:
        with self._warming:
            if self._warm is not None and self._warm.process.poll() is not None:
                self._warm.end()
                self._warm = None
            if self._trainer is not None and self._warm is None:
                self._warm = Warm(self._command, imports_path(self._peer.rank))

    def _send(self, kind: str, **fields: object) -> None:
        message = {"kind": kind, "attempt": self._attempt.number, **fields}
        self._sent = [message] if kind == "started" else [*self._sent, message]
        # If this agent is gone, the next agent receives all of these messages. If the node's
        # process is gone, the guard ends this process.
        with contextlib.suppress(OSError):
            self._client.send(message)


def _rank_environment(base: dict[str, str]) -> dict[str, str]:
    environment = {**base, **turned(base), "PYTHONUNBUFFERED": "1"}
    environment.pop(ENV_PYTHON_EXEC, None)  # a torchrun that the rank starts must start no shim
    return environment


def _begin_rank() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the guard blocked the signal


def _keep(stream: IO[bytes], log: RotatingLog, echo: "_Echo | None") -> None:
    with stream:
        while chunk := os.read(stream.fileno(), CHUNK_BYTES):
            log.write(chunk)
            if echo is not None:
                echo.put(chunk)
    log.close()


class _Echo:
    """Show the lines of a rank on the launcher's standard output.

    Lines that the terminal does not accept are dropped.
    """

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
                return  # the terminal was closed; the log continues


if __name__ == "__main__":
    main()
