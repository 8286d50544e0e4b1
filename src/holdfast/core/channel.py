"""Bounded frames over sockets, and the token that is demanded before the first of them.

A frame is four bytes of length (little endian) and that many bytes. A greeting is the name of a protocol, of a fixed
length, and a frame that holds a token: whoever listens reads the greeting, within a time limit, before anything else.
Each end may be asyncio's (`read_frame`, `is_greeted`) or a blocking socket (`receive_frame`, `await_greeting`).

What a frame holds is its users' business. Only the standard library is imported here: processes that run generated
code use these frames, too.
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
"""Memory is taken as bytes arrive, not as a length announces."""
_LOSS_OPTIONS: Final = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
"""Seconds, seconds, probes, milliseconds: tcp(7)."""


class HungUp(ConnectionResetError, EOFError):
    """The other side ended the connection."""

    def __init__(self) -> None:
        super().__init__("the peer ended the connection")


def frame(body: bytes, max_bytes: int, *, what: str = "A message") -> bytes:
    """Return the frame that holds `body`.

    Raises:
        ChannelError: `what` is longer than `max_bytes`.
    """
    if len(body) > max_bytes:
        raise ChannelError(f"{what} has {len(body)} bytes; at most {max_bytes} fit.")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def read_frame(reader: "asyncio.StreamReader", max_bytes: int) -> bytes:
    """Read the next frame from a stream.

    Raises:
        HungUp: the other side is gone.
        ChannelError: a longer frame is announced.
    """
    try:
        size_bytes = _size_bytes(await reader.readexactly(_LENGTH_BYTES), max_bytes)
        return await reader.readexactly(size_bytes)
    except (EOFError, ConnectionError) as error:  # asyncio.IncompleteReadError is an EOFError
        raise HungUp from error


def receive_frame(
    connection: socket.socket, max_bytes: int, *, within_s: float | None = None
) -> bytes:
    """Receive the next frame from a blocking socket, whole `within_s`; None: within the socket's own timeouts.

    Raises:
        HungUp: the other side is gone.
        TimeoutError: the frame did not arrive in time.
        ChannelError: a longer frame is announced.
    """
    until_s = None if within_s is None else time.monotonic() + within_s
    length = _receive(connection, _LENGTH_BYTES, until_s)
    return _receive(connection, _size_bytes(length, max_bytes), until_s)


def receive_exactly(
    connection: socket.socket, size_bytes: int, *, within_s: float | None = None
) -> bytes:
    """Receive `size_bytes` bytes from a blocking socket; see `receive_frame`.

    Raises:
        HungUp, TimeoutError: see `receive_frame`.
    """
    until_s = None if within_s is None else time.monotonic() + within_s
    return _receive(connection, size_bytes, until_s)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from a blocking socket, however long that takes, as long as each part arrives in its timeout.

    Raises:
        HungUp: the other side is gone.
        TimeoutError: nothing arrived in the socket's timeout.
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
    """Receive a greeting on a blocking socket; return whether it has this protocol and token.

    Raises:
        HungUp, TimeoutError: see `receive_frame`.
    """
    until_s = time.monotonic() + within_s
    size_bytes = _greeting_bytes(_receive(connection, len(magic) + _LENGTH_BYTES, until_s), magic)
    return size_bytes is not None and is_token(_receive(connection, size_bytes, until_s), token)


async def is_greeted(connection: socket.socket, magic: bytes, token: bytes) -> bool:
    """Receive a greeting on a socket of the event loop; see `await_greeting`. The caller limits the time.

    Raises:
        HungUp: the other side is gone.
    """
    size_bytes = _greeting_bytes(await sock_receive(connection, len(magic) + _LENGTH_BYTES), magic)
    return size_bytes is not None and is_token(await sock_receive(connection, size_bytes), token)


async def sock_receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Receive `size_bytes` bytes from a socket of the event loop.

    Raises:
        HungUp: the other side is gone.
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
    """Compare a token with the right one, in constant time."""
    import hmac  # a process without a token does without it

    return hmac.compare_digest(given, token)


def notice_loss(connection: socket.socket) -> None:
    """Send at once, and end the connection soon after the other machine is gone, whether or not anything is sent.

    A connection to a host may be silent for long: without probes a node's loss of power would stay unnoticed.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOSS_OPTIONS.items():
        if hasattr(socket, name):  # of Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _size_bytes(length: bytes, max_bytes: int) -> int:
    size_bytes = int.from_bytes(length, "little")
    if size_bytes > max_bytes:
        raise ChannelError(f"A frame of {size_bytes} bytes was announced; at most {max_bytes} fit.")
    return size_bytes


def _greeting_bytes(head: bytes, magic: bytes) -> int | None:
    """Return the announced size of the token; None if the greeting is another protocol's."""
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
