"""Keep an agent's connection to the supervisor open while the node lives.

The node's process receives a copy of the connection, holds the copy open, and never uses it. So the
connection stays open if only the agent is killed, until the next agent connects. It ends when the
whole node is gone, which the supervisor can then detect.
"""

import asyncio
import contextlib
import os
import socket


class HeldConnection:
    """Hold the agent's connection in the node's process. Call all methods from one event loop."""

    def __init__(self) -> None:
        self._receiving, self.sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """The socket of the node's process, and the one of its agents; each agent inherits
        `sending`.
        """
        self._receiving.setblocking(False)
        self.fd: int | None = None
        """The connection that was received last."""

    def watch(self) -> None:
        """Start to receive connections."""
        asyncio.get_running_loop().add_reader(self._receiving, self._receive)

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # no file descriptor is free now
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
    """Pass a connection of this agent to the node's process, which holds it.

    If this fails, the connection ends with the agent, even if the node is still alive.
    """
    with contextlib.suppress(OSError):
        socket.send_fds(sending, [b"c"], [fd])
