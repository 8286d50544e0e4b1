"""A connection to the coordinator, as one that dials in has it."""

import asyncio
import socket
from collections.abc import Iterator

from holdfast.evaluate.coordinator import wire
from holdfast.evaluate.errors import EvaluationError

_CONNECT_TIMEOUT_S = 5.0
_SILENT_PEER_S = 10.0  # unacknowledged by the other machine for so long, a connection is broken
_BACK_OFF_S = (0.05, 0.5)


def waits_s() -> Iterator[float]:
    """How long to wait before each next try: 0.05 s, doubled up to 0.5 s."""
    wait_s, most_s = _BACK_OFF_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, most_s)


async def dial(address: str, hello: wire.Hello) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and be welcomed.

    Raises:
        OSError, TimeoutError, EOFError, ChannelError: not now.
        EvaluationError: the coordinator refuses.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENT_PEER_S * 1000))
        writer.write(wire.encode(hello))
        async with asyncio.timeout(wire.HELLO_TIMEOUT_S):
            answer = await wire.read(reader)
    except BaseException:
        writer.close()
        raise
    if not isinstance(answer, wire.Welcome):
        writer.close()
        raise EvaluationError(answer.why if isinstance(answer, wire.Refused) else f"{address} is no coordinator.")
    return reader, writer
