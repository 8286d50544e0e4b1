"""What the host tells the processes forked for it, and hears: frames over a socket of each one's own.

A frame is as on the wire: four bytes of length (little endian) and that many of msgpack. Both ends are this program's.
"""

import asyncio
import socket

import msgspec

from holdfast.evaluate.wire.messages import (
    MeasureSample,
    Prepare,
    Prepared,
    RunTask,
    SampleMeasured,
    TaskEnded,
)


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A client has built its requests and asked them: from now on it mostly waits."""


Job = Prepare | RunTask | MeasureSample
Said = Prepared | Asked | TaskEnded | SampleMeasured

_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
_saids = msgspec.msgpack.Decoder(Said)


def frame(message: Job | Said) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def receive(channel: socket.socket) -> Job:
    """The next job; waits for it.

    Raises:
        EOFError: the host wants no more.
    """
    size_bytes = int.from_bytes(_exactly(channel, 4), "little")
    job: Job = _jobs.decode(_exactly(channel, size_bytes))
    return job


async def read(reader: asyncio.StreamReader) -> Said:
    """The next thing that a process said.

    Raises:
        EOFError: it says no more.
    """
    try:
        size_bytes = int.from_bytes(await reader.readexactly(4), "little")
        said: Said = _saids.decode(await reader.readexactly(size_bytes))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    return said


def _exactly(channel: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        part = channel.recv(min(size_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
