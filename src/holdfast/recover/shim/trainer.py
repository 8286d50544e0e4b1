"""Wait for an order, and then become a rank's trainer, or fork the trainer.

The command is `trainer FD IMPORTS COMMAND …`. FD is a socket to the shim. IMPORTS is a file with
modules to import first, or empty. COMMAND is there only to be seen in lists of processes; the order
names the script.

If only one thread runs after the imports, the process forks a trainer at each order, so that the
next trainer does not have to import the modules again. Without imports, or with several threads,
the process itself becomes the trainer. The process ends if an import failed half-way, opened a GPU,
or imported a module that a file beside the script hides. The shim then starts a new process without
imports.

| from | `kind` | fields |
|---|---|---|
| trainer | `ready` | `forks`: True if an order forks the trainer |
| shim | `start` | `script`; `environment`: variables to add; `prefix`: for the launcher's store; a pipe for output |
| trainer | `started` | `pid`; and a process file descriptor, if the trainer is a fork |
| trainer | `exited` | `returncode` (negative: the signal), `at_monotonic_s`; only from a process that forks |
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.processes import die_with_parent
from holdfast.recover.shim.imports import Imports, can_fork, has_device
from holdfast.recover.shim.script import Script, give_store_prefix

MAX_MESSAGE_BYTES = 64 * 1024
"""The largest size of a message in bytes; a message is one datagram."""


def send(control: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Send a message and descriptors with it.

    Raises:
        OSError: the other side is gone, or the message is too long.
    """
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its file descriptors; None if the sender is gone or silent for too long."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        body, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if body:
            return json.loads(body), descriptors
    return None


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command to run, and the destination of its output."""

    script: Script
    environment: dict[str, str]
    """Environment variables to add to those with which this process began."""
    prefix: str
    output: int


def main() -> None:
    """Wait for an order, and run its script in this process or in a fork."""
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    began = dict(os.environ)
    imports = sys.argv[2]
    if imports:
        # If an import fails in any way, the next start is only slower, and does not fail.
        try:
            Imports.read(Path(imports)).load()
        except BaseException:
            os._exit(1)
        if has_device():
            os._exit(1)
    # Without imports, a fork would save no time.
    order = _await_order(control, forks=bool(imports) and can_fork())
    if order is not None:
        _become(order, began)
        order.script.run()


def _await_order(control: socket.socket, *, forks: bool) -> Order | None:
    """Return the order that this process, or this fork of it, must run; None if the shim is gone."""
    send(control, {"kind": "ready", "forks": forks})
    if forks:
        gc.freeze()  # otherwise, the garbage collector of a fork would copy all imported pages
    while (received := receive(control)) is not None:
        message, (output,) = received
        order = Order(
            script=Script.from_json(message["script"]),
            environment=message["environment"],
            prefix=message["prefix"],
            output=output,
        )
        if order.script.hides({name.partition(".")[0] for name in sys.modules}):
            return None
        if not forks:
            send(control, {"kind": "started", "pid": os.getpid()})
            control.close()
            return order
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            control.close()
            return order
        os.close(output)
        # The descriptor is opened before the end of the fork is awaited, so that it cannot refer to
        # another process.
        watched = os.pidfd_open(pid)
        send(control, {"kind": "started", "pid": pid}, watched)
        _report_end(control, pid, watched)
    return None


def _report_end(control: socket.socket, pid: int, watched: int) -> None:
    ended, _, _ = select.select([watched, control.fileno()], [], [])
    os.close(watched)
    if watched not in ended:
        sys.exit(0)  # the shim is gone; the kernel ends the fork with this process
    _, status = os.waitpid(pid, 0)
    ended_at_s = time.monotonic()
    returncode = os.waitstatus_to_exitcode(status)
    send(control, {"kind": "exited", "returncode": returncode, "at_monotonic_s": ended_at_s})


def _become(order: Order, began: dict[str, str]) -> None:
    """Set output, environment, signals and seeds to the state of a new interpreter.

    Args:
        order: what to run.
        began: the environment with which this process began.
    """
    # A signal that was sent to the waiting process was not meant for the trainer. Ignoring the
    # signal discards it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the guard blocked SIGTERM
    for descriptor in (1, 2):
        os.dup2(order.output, descriptor)
    os.close(order.output)
    os.environ.clear()
    os.environ.update(began | order.environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python itself seeds `random` anew in each fork
    give_store_prefix(order.prefix)


if __name__ == "__main__":
    main()
