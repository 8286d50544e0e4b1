"""Keep the connection of an agent open while its node lives.

The process that keeps the node going receives a copy of the agent's connection to the supervisor.
That process holds the copy and never uses it. So the connection ends with the node, and stays open
while an agent is killed and the next one connects.
"""

import asyncio
import contextlib
import os
import socket


class HeldConnection:
    """The node's side of the held connection. Call all methods from one event loop."""

    def __init__(self) -> None:
        self._receiving, self.sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """The sockets of the node and of its agents; each agent inherits `sending`."""
        self._receiving.setblocking(False)
        self.fd: int | None = None
        """The connection that was received last."""

    def watch(self) -> None:
        """Receive connections from now on."""
        asyncio.get_running_loop().add_reader(self._receiving, self._receive)

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is free just now
            _, fds, _, _ = socket.recv_fds(self._receiving, 1, 1)
            for fd in fds:
                self._let_go()
                self.fd = fd

    def _let_go(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Close the held connection and both sockets."""
        asyncio.get_running_loop().remove_reader(self._receiving)
        self._receiving.close()
        self.sending.close()
        self._let_go()


def send_connection(sending: socket.socket, fd: int) -> None:
    """Pass a connection of this agent to the node, which holds it.

    If that fails, the connection ends with the agent, even if the node still lives.
    """
    with contextlib.suppress(OSError):
        socket.send_fds(sending, [b"c"], [fd])
