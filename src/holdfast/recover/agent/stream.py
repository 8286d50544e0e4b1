"""Exchange JSON messages over one connection of an event loop.

The node's process, its agent and the supervisor exchange messages in this way, over socket pairs on
one node and over TCP between nodes. The size of frames is limited (see `core.channel`). No received
message is unpickled or executed.
"""

import asyncio
import contextlib
import hmac
import json
import socket
import struct
from typing import Any, Self

from holdfast.core.channel import frame, read_frame
from holdfast.core.errors import ChannelError
from holdfast.recover.channel import decode

MAX_BYTES = 4 * 1024 * 1024
"""The largest size of a message in bytes. It must be enough for an answer about all ranks of a
node, and for any message of a rank in its envelope.
"""
CONNECT_TIMEOUT_S = 5.0
_UNACKNOWLEDGED = struct.Struct("@24xI")
"""The offset of `tcpi_unacked` in the kernel's `struct tcp_info`."""


def proof(token: str, role: str, nonce: str) -> str:
    """Return a proof that one side of a connection has the token. It does not reveal the token."""
    return hmac.new(token.encode(), f"{role} {nonce}".encode(), "sha256").hexdigest()


class Stream:
    """A connection that carries messages. Call all methods from its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of_socket(cls, connection: socket.socket) -> Self:
        """Make a stream from a connected socket."""
        return cls(*await asyncio.open_connection(sock=connection, limit=MAX_BYTES))

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        """Connect over TCP.

        Raises:
            OSError: no program listens there, or the address cannot be reached in time.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_BYTES)
        # No limit for unacknowledged bytes (TCP_USER_TIMEOUT), so that a connection survives a cut.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the connection is closing."""
        if not self._writer.is_closing():
            body = json.dumps(message, separators=(",", ":"), default=str)
            self._writer.write(frame(body.encode(), MAX_BYTES))

    async def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; return None if the other side is gone or sent a malformed one."""
        try:
            return decode(await read_frame(self._reader, MAX_BYTES))
        except (OSError, ChannelError):
            return None

    async def flushed(self) -> None:
        """Wait until the kernel has accepted all sent messages."""
        self._writer.transport.set_write_buffer_limits(0)
        await self.drained()

    async def drained(self) -> None:
        """Wait until there is room to send more messages."""
        with contextlib.suppress(OSError):  # the connection is lost: `receive` then returns None
            await self._writer.drain()

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes that wait in this process to be sent."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def is_acknowledged(self) -> bool:
        """True if the kernel of the other host has acknowledged all bytes that were sent.

        It is also True if the kernel of this host cannot provide this information.
        """
        try:
            connection = self._writer.get_extra_info("socket")
            size = _UNACKNOWLEDGED.size
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        except (OSError, AttributeError):
            return True
        return len(info) < size or _UNACKNOWLEDGED.unpack(info)[0] == 0

    @property
    def fd(self) -> int:
        """The file descriptor of the socket."""
        return int(self._writer.get_extra_info("socket").fileno())

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def remote_host(self) -> str:
        """The address of the other end."""
        return str(self._writer.get_extra_info("peername")[0])

    def close(self) -> None:
        """Close the connection after all messages have been sent."""
        self._writer.close()
