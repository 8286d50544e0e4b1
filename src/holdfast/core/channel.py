"""Send and receive bounded frames over sockets, and check a token before the first frame.

A frame is a length of four bytes (little endian), followed by that many bytes. A connection begins
with a greeting: the protocol's name, which has a fixed length, and a frame that holds a token. A
server reads the greeting first, and within a time limit. Either end may use asyncio (`read_frame`,
`is_greeted`) or a blocking socket (`receive_frame`, `await_greeting`).

This module does not define what a frame contains. It imports only the standard library, because
processes that run generated code also use frames.
"""

import socket
import time
from typing import TYPE_CHECKING, Final

from holdfast.core.errors import ChannelError

if TYPE_CHECKING:
    import asyncio

_LENGTH_BYTES: Final = 4
_MAX_TOKEN_BYTES: Final = 512
_RECEIVE_BYTES: Final = 1 << 20
"""The most bytes to receive at once, so that a false length does not allocate much memory."""
_LOSS_OPTIONS: Final = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
"""Socket options of tcp(7): two times in seconds, a number of probes, a time in milliseconds."""


class HungUp(ConnectionResetError, EOFError):
    """The peer ended the connection."""

    def __init__(self) -> None:
        super().__init__("the peer ended the connection")


def frame(body: bytes, max_bytes: int, *, what: str = "A message") -> bytes:
    """Return a frame that holds `body`.

    Args:
        body: the content of the frame.
        max_bytes: the most bytes that `body` may have.
        what: the name of `body` in the error message.

    Raises:
        ChannelError: `body` is longer than `max_bytes`.
    """
    if len(body) > max_bytes:
        raise ChannelError(f"{what} has {len(body)} bytes; at most {max_bytes} fit.")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def read_frame(reader: "asyncio.StreamReader", max_bytes: int) -> bytes:
    """Read the next frame from a stream.

    Raises:
        HungUp: the peer ended the connection.
        ChannelError: the frame is longer than `max_bytes`.
    """
    try:
        size_bytes = _size_bytes(await reader.readexactly(_LENGTH_BYTES), max_bytes)
        return await reader.readexactly(size_bytes)
    except (EOFError, ConnectionError) as error:  # asyncio.IncompleteReadError is an EOFError
        raise HungUp from error


def receive_frame(
    connection: socket.socket, max_bytes: int, *, within_s: float | None = None
) -> bytes:
    """Receive the next frame from a blocking socket.

    Args:
        connection: the socket.
        max_bytes: the most bytes that the frame may hold.
        within_s: the time limit for the whole frame, in seconds; None: only the socket's own
            timeout holds, for each part of the frame.

    Raises:
        HungUp: the peer ended the connection.
        TimeoutError: the frame did not arrive in time.
        ChannelError: the frame is longer than `max_bytes`.
    """
    until_s = None if within_s is None else time.monotonic() + within_s
    length = _receive(connection, _LENGTH_BYTES, until_s)
    return _receive(connection, _size_bytes(length, max_bytes), until_s)


def receive_exactly(
    connection: socket.socket, size_bytes: int, *, within_s: float | None = None
) -> bytes:
    """Receive `size_bytes` bytes from a blocking socket; for `within_s` see `receive_frame`.

    Raises:
        HungUp, TimeoutError: see `receive_frame`.
    """
    until_s = None if within_s is None else time.monotonic() + within_s
    return _receive(connection, size_bytes, until_s)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Receive bytes from a blocking socket until `target` is full; the total time has no limit.

    Raises:
        HungUp: the peer ended the connection.
        TimeoutError: no byte arrived within the socket's timeout.
    """
    while target:
        count = connection.recv_into(target)
        if not count:
            raise HungUp
        target = target[count:]


def greeting(magic: bytes, token: bytes) -> bytes:
    """Return the first bytes of a connection: the protocol's name and the token."""
    return magic + frame(token, _MAX_TOKEN_BYTES, what="A token")


def await_greeting(
    connection: socket.socket, magic: bytes, token: bytes, *, within_s: float
) -> bool:
    """Receive a greeting on a blocking socket; return True if the protocol and the token are right.

    Raises:
        HungUp, TimeoutError: see `receive_frame`.
    """
    until_s = time.monotonic() + within_s
    size_bytes = _greeting_bytes(_receive(connection, len(magic) + _LENGTH_BYTES, until_s), magic)
    return size_bytes is not None and is_token(_receive(connection, size_bytes, until_s), token)


async def is_greeted(connection: socket.socket, magic: bytes, token: bytes) -> bool:
    """Receive a greeting on a socket of the event loop; return True if it is right.

    The protocol and the token must be right. The caller limits the time.

    Raises:
        HungUp: the peer ended the connection.
    """
    size_bytes = _greeting_bytes(await sock_receive(connection, len(magic) + _LENGTH_BYTES), magic)
    return size_bytes is not None and is_token(await sock_receive(connection, size_bytes), token)


async def sock_receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Receive `size_bytes` bytes from a socket of the event loop.

    Raises:
        HungUp: the peer ended the connection.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size_bytes:
        part = await loop.sock_recv(connection, min(size_bytes - len(data), _RECEIVE_BYTES))
        if not part:
            raise HungUp
        data += part
    return bytes(data)


def is_token(given: bytes, token: bytes) -> bool:
    """Return True if `given` equals the right token; compare in constant time."""
    import hmac  # imported here, since a process without a token does not need the module

    return hmac.compare_digest(given, token)


def notice_loss(connection: socket.socket) -> None:
    """Configure a socket to send without delay, and to detect the loss of the peer's machine.

    The connection ends about 10 s after the loss. A connection may be idle for a long time. Without
    keepalive probes, an idle connection would never show that the peer's machine has lost power.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOSS_OPTIONS.items():
        if hasattr(socket, name):  # Linux only
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _size_bytes(length: bytes, max_bytes: int) -> int:
    size_bytes = int.from_bytes(length, "little")
    if size_bytes > max_bytes:
        raise ChannelError(f"A frame of {size_bytes} bytes was announced; at most {max_bytes} fit.")
    return size_bytes


def _greeting_bytes(head: bytes, magic: bytes) -> int | None:
    """Return the size of the token, from the fixed part of a greeting.

    The result is None if the greeting belongs to another protocol.
    """
    size_bytes = int.from_bytes(head[len(magic) :], "little")
    return size_bytes if head.startswith(magic) and size_bytes <= _MAX_TOKEN_BYTES else None


def _receive(connection: socket.socket, size_bytes: int, until_s: float | None) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        if until_s is not None:
            connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        try:
            part = connection.recv(min(size_bytes - len(data), _RECEIVE_BYTES))
        except ConnectionError as error:
            raise HungUp from error
        if not part:
            raise HungUp
        data += part
    return bytes(data)
