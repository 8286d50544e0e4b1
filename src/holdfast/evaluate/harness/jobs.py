"""What the host tells the processes forked for it, and hears: frames over a socket of each one's own.

A frame (see `core.channel`) holds msgpack, as on the wire. Both ends are this program's.
"""

import asyncio
import socket

import msgspec

from holdfast.core import channel
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

_MAX_BYTES = (1 << 32) - 1  # all that a length can say: both ends trust each other
_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
_saids = msgspec.msgpack.Decoder(Said)


def frame(message: Job | Said) -> bytes:
    """A message as it is sent."""
    return channel.frame(_encoder.encode(message), _MAX_BYTES)


def receive(host: socket.socket) -> Job:
    """The next job; waits for it.

    Raises:
        HungUp: the host wants no more.
    """
    job: Job = _jobs.decode(channel.receive_frame(host, _MAX_BYTES))
    return job


async def read(reader: asyncio.StreamReader) -> Said:
    """The next thing that a process said.

    Raises:
        HungUp: it says no more.
    """
    said: Said = _saids.decode(await channel.read_frame(reader, _MAX_BYTES))
    return said
