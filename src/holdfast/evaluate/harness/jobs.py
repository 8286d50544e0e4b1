"""Exchange frames with forked processes, over one socket for each process.

A frame (see `core.channel`) holds msgpack, as on the network. Both ends run Holdfast.
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


class AllSent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent by a client when it has sent all its requests, and from then on mostly waits."""


Job = Prepare | RunTask | MeasureSample
ChildMessage = Prepared | AllSent | TaskEnded | SampleMeasured

_MAX_BYTES = (1 << 32) - 1  # the largest length in a frame: both ends trust each other
_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
_child_messages = msgspec.msgpack.Decoder(ChildMessage)


def frame(message: Job | ChildMessage) -> bytes:
    """Encode a message as a frame."""
    return channel.frame(_encoder.encode(message), _MAX_BYTES)


def receive(host: socket.socket) -> Job:
    """Wait for the next job.

    Raises:
        HungUp: the host closed the channel: there are no more jobs.
    """
    job: Job = _jobs.decode(channel.receive_frame(host, _MAX_BYTES))
    return job


async def read(reader: asyncio.StreamReader) -> ChildMessage:
    """Read the next message of a forked process.

    Raises:
        HungUp: the process closed the channel.
    """
    message: ChildMessage = _child_messages.decode(await channel.read_frame(reader, _MAX_BYTES))
    return message
