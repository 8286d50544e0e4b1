"""Test frames and greetings with slow, lost and unknown peers, between both kinds of ends."""

import asyncio
import contextlib
import socket
import threading

import pytest

from holdfast.core.channel import (
    HungUp,
    await_greeting,
    frame,
    greeting,
    is_greeted,
    read_frame,
    receive_exactly,
    receive_frame,
    receive_into,
)
from holdfast.core.errors import ChannelError

TOKEN = b"secret"
STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    greeting(b"HFT1", b"wrong!"),
    greeting(b"HFT1", b""),
    greeting(b"HFT2", TOKEN),
    b"HFT1" + b"\xff" * 100,
]


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


async def as_read(data):
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_frame(reader, 100)


@pytest.mark.parametrize("body", [b"", b"x", b"y" * 100])
def test_a_frame_arrives_as_it_was_sent(ends, body):
    one, other = ends
    one.sendall(frame(body, 100) + frame(b"next", 100))
    assert receive_frame(other, 100) == body
    assert receive_frame(other, 100, within_s=30) == b"next"
    assert asyncio.run(as_read(frame(body, 100))) == body


def test_frames_are_bounded(ends):
    one, other = ends
    with pytest.raises(ChannelError, match="A name has 101 bytes; at most 100 fit"):
        frame(bytes(101), 100, what="A name")
    one.sendall(frame(bytes(101), 200))
    with pytest.raises(ChannelError, match="A frame of 101 bytes was announced; at most 100 fit"):
        receive_frame(other, 100)
    with pytest.raises(ChannelError, match="was announced"):
        asyncio.run(as_read(frame(bytes(101), 200)))


@pytest.mark.parametrize("sent", [b"", b"\x05\x00", frame(b"body", 100)[:-1]])
def test_an_end_in_the_middle_of_a_frame(ends, sent):
    one, other = ends
    one.sendall(sent)
    one.close()
    with pytest.raises(HungUp):
        receive_frame(other, 100)
    with pytest.raises(HungUp):
        asyncio.run(as_read(sent))


def test_a_frame_must_be_whole_in_time(ends):
    one, other = ends
    one.sendall(frame(b"body", 100)[:-1])
    with pytest.raises(TimeoutError):
        receive_frame(other, 100, within_s=0.01)


def test_what_is_large_arrives_in_parts(ends):
    one, other = ends
    sent, target = bytes(range(256)) * 20_000, bytearray(5_120_000)
    sending = threading.Thread(target=one.sendall, args=(sent * 2,))
    sending.start()
    assert receive_exactly(other, len(sent)) == sent
    receive_into(other, memoryview(target))
    sending.join()
    assert target == sent
    one.close()
    with pytest.raises(HungUp):
        receive_into(other, memoryview(target))


def greeted(first):
    """Return, for a blocking end and one of an event loop, whether each accepts a first message."""
    found = []
    for is_blocking in (True, False):
        one, other = socket.socketpair()
        with one, other:
            one.sendall(first)
            one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(HungUp):
                if is_blocking:
                    found.append(await_greeting(other, b"HFT1", TOKEN, within_s=30))
                else:
                    other.setblocking(False)
                    found.append(asyncio.run(is_greeted(other, b"HFT1", TOKEN)))
    return found


def test_whoever_has_the_token_is_greeted():
    assert greeted(greeting(b"HFT1", TOKEN)) == [True, True]


@pytest.mark.parametrize("first", STRANGERS)
def test_strangers_are_not(first):
    assert greeted(first) == [False, False]


def test_half_a_greeting_is_none():
    assert greeted(greeting(b"HFT1", TOKEN)[:-1]) == []
