"""Wait for an order, and then become a rank's trainer or fork the trainer.

`trainer FD IMPORTS COMMAND …`: FD is a socket to the shim, IMPORTS a file of modules to import
first, or nothing. If only one thread runs after the imports, the process forks a trainer at each
order, so that the next trainer need not import again. Without imports, or with several threads, the
process becomes the trainer itself. The process ends if the imports failed half-way, opened a GPU,
or imported a module that a file beside the script hides: the shim then starts a new process without
imports. COMMAND only appears in lists of processes; the order names the script.

| from | `kind` | fields |
|---|---|---|
| trainer | `ready` | `forks`: whether an order forks |
| shim | `start` | `script`; `environment`: added to its own; `prefix`: in the launcher's store; and the output's pipe |
| trainer | `started` | `pid`; and, of a fork, a descriptor of the process |
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
"""A message is one datagram."""


def send(control: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Send a message and descriptors with it.

    Raises:
        OSError: the other side is gone, or the message is too long.
    """
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors; None if the sender is gone or silent too long."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        body, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if body:
            return json.loads(body), descriptors
    return None


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command to run, and the files of its output."""

    script: Script
    environment: dict[str, str]
    """Variables that are added to those that this process began with."""
    prefix: str
    output: int


def main() -> None:
    """Wait for an order, and run its script in this process or in a fork."""
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    began = dict(os.environ)
    imports = sys.argv[2]
    if imports:
        # Whatever an import does, the next start is then a slower one, and no failure.
        try:
            Imports.read(Path(imports)).load()
        except BaseException:
            os._exit(1)
        if has_device():
            os._exit(1)
    # Without imports a fork saves nothing.
    order = _await_order(control, forks=bool(imports) and can_fork())
    if order is not None:
        _become(order, began)
        order.script.run()


def _await_order(control: socket.socket, *, forks: bool) -> Order | None:
    """Return the order for this process or this fork of it; None if the shim is gone."""
    send(control, {"kind": "ready", "forks": forks})
    if forks:
        gc.freeze()  # so that the collector of a fork does not copy every page of what is imported here
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
        # Opened before the fork is waited for, so that it stays the fork's.
        watched = os.pidfd_open(pid)
        send(control, {"kind": "started", "pid": pid}, watched)
        _report_end(control, pid, watched)
    return None


def _report_end(control: socket.socket, pid: int, watched: int) -> None:
    ended, _, _ = select.select([watched, control.fileno()], [], [])
    os.close(watched)
    if watched not in ended:
        sys.exit(0)  # the shim is gone: the kernel ends the fork with this process
    _, status = os.waitpid(pid, 0)
    ended_at_s = time.monotonic()
    returncode = os.waitstatus_to_exitcode(status)
    send(control, {"kind": "exited", "returncode": returncode, "at_monotonic_s": ended_at_s})


def _become(order: Order, began: dict[str, str]) -> None:
    """Set output, environment, signals and seeds as a new interpreter would have them.

    Args:
        order: the order to start a trainer.
        began: the environment that this process began with.
    """
    # What was sent to the waiting process was not for the trainer: ignoring the signal discards it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the guard blocked it
    for descriptor in (1, 2):
        os.dup2(order.output, descriptor)
    os.close(order.output)
    os.environ.clear()
    os.environ.update(began | order.environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator is seeded anew by each fork
    give_store_prefix(order.prefix)


if __name__ == "__main__":
    main()
