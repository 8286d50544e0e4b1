"""Exchange chunks over real sockets: answers and refusals."""

import asyncio
import contextlib
import socket

import pytest
import xxhash

from holdfast.core.channel import greeting
from holdfast.core.rate_limit import AsyncRateLimit
from holdfast.evaluate.weights import exchange
from holdfast.evaluate.weights.exchange import (
    ChunkServer,
    CorruptedChunk,
    PeerHasNot,
    PeerLink,
    PeerLost,
)
from holdfast.evaluate.weights.store import SharedFile
from holdfast.testing import FakeClock

MODEL = bytes(range(16))
CONTENT = bytes(range(256)) * 4000
HALF = len(CONTENT) // 2


class Shelf:
    """Hold two chunks of one file; the second comes when the test sets its event."""

    def __init__(self, folder):
        self.file = SharedFile(folder / "file", len(CONTENT))
        self.file.write(memoryview(CONTENT), 0)
        self.second = asyncio.Event()
        self.done_with = []

    async def wait_for(self, chunk):
        if chunk > 1:
            raise PeerHasNot
        if chunk == 1:
            await self.second.wait()
        return xxhash.xxh3_128_digest(CONTENT[:HALF] if chunk == 0 else CONTENT[HALF:])

    def place(self, chunk):
        return self.file, chunk * HALF, HALF

    def held(self):
        return bytes([3 if self.second.is_set() else 1])

    def finished(self, node):
        self.done_with.append(node)


def exchanging(folder, talk, *, rate=None, clock=None, sleep=asyncio.sleep):
    """Run `talk(link, shelf, server, address)` against a server."""

    async def run():
        shelf = Shelf(folder)
        server = ChunkServer(
            "secret", AsyncRateLimit(rate, (clock or FakeClock()).monotonic_s, sleep)
        )
        address = await server.start("127.0.0.1")
        server.show(MODEL, shelf)
        link = await PeerLink.dial(address, "secret")
        try:
            return await talk(link, shelf, server, address)
        finally:
            link.close()
            await server.close()

    return asyncio.run(run())


async def freely(_size_bytes):
    """Apply no limit."""


async def get(link, number):
    got = bytearray(HALF)

    def write(data, offset):
        got[offset : offset + len(data)] = data

    digest = await link.chunk(MODEL, number, HALF, write, freely)
    assert digest == xxhash.xxh3_128_digest(got)
    return bytes(got)


def test_chunks_come_whole_and_late_ones_when_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "WAIT_EVERY_S", 0.01)

    async def talk(link, shelf, server, address):
        assert await get(link, 0) == CONTENT[:HALF]
        assert await link.held(MODEL, 2) == {0}
        waiting = asyncio.ensure_future(get(link, 1))
        other = await PeerLink.dial(address, "secret")
        assert await get(other, 0) == CONTENT[:HALF]
        other.close()
        assert not waiting.done()
        shelf.second.set()
        assert await waiting == CONTENT[HALF:]
        assert await link.held(MODEL, 2) == {0, 1}
        await link.say_finished(MODEL, 7)
        assert shelf.done_with == [7]
        assert server.sent_bytes == 3 * HALF

    exchanging(tmp_path, talk)


def test_what_is_not_there_and_will_not_be(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "UNKNOWN_MODEL_S", 0.01)

    async def talk(link, shelf, server, address):
        with pytest.raises(PeerHasNot):
            await get(link, 5)
        with pytest.raises(PeerHasNot):
            await link.chunk(bytes(16), 0, HALF, lambda *_: None, freely)
        monkeypatch.setattr(exchange, "UNKNOWN_MODEL_S", 1000.0)
        server.take_away(MODEL, shelf)
        with pytest.raises(PeerHasNot):  # at once
            await get(link, 0)
        with pytest.raises(PeerHasNot):
            await link.held(MODEL, 2)

    exchanging(tmp_path, talk)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        greeting(exchange.MAGIC, b"wrong"),
        greeting(exchange.MAGIC, b""),
        greeting(b"HFC1", b"secret"),
        exchange.MAGIC + b"\xff\xff" + b"x" * 1000,
        b"",
    ],
)
def test_whoever_has_no_token_gets_not_one_byte(tmp_path, monkeypatch, first):
    monkeypatch.setattr(exchange, "SILENCE_S", 0.05 if not first else 10.0)

    async def talk(link, shelf, server, address):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(first + exchange._REQUEST.pack(exchange.CHUNK, MODEL, 0))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    exchanging(tmp_path, talk)


def test_a_request_that_is_none_ends_the_connection(tmp_path):
    async def talk(link, shelf, server, address):
        with pytest.raises(PeerLost):
            await link._ask(99, MODEL, 0)

    exchanging(tmp_path, talk)


def test_a_corrupted_chunk_is_noticed(tmp_path):
    async def talk(link, shelf, server, address):
        shelf.file.write(memoryview(b"\xff"), 1000)
        with pytest.raises(CorruptedChunk):
            await get(link, 0)
        shelf.file.write(memoryview(CONTENT[1000:1001]), 1000)
        assert await get(link, 0) == CONTENT[:HALF], "the connection is still in step"

    exchanging(tmp_path, talk)


@pytest.mark.parametrize("manner", ["silent", "closes", "nobody", "noise", "endless"])
def test_a_peer_that_hangs_or_dies_is_lost(tmp_path, monkeypatch, manner):
    monkeypatch.setattr(exchange, "SILENCE_S", 0.1)

    replies = {
        "noise": b"\xee" * 25,
        "endless": exchange._REPLY.pack(exchange.HERE, bytes(16), 1 << 60),
    }

    async def run():
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            if manner == "nobody":
                listener.close()
            asking = asyncio.ensure_future(ask(address))
            if manner != "nobody":
                peer, _ = await loop.sock_accept(listener)
                with peer:
                    if manner != "closes":
                        await loop.sock_sendall(peer, replies.get(manner, b""))
                        await asyncio.wait([asking])
            await asking

    async def ask(address):
        link = await PeerLink.dial(address, "secret")
        with contextlib.closing(link):
            await get(link, 0)

    with pytest.raises(PeerLost):
        asyncio.run(run())


def test_addresses_that_are_none():
    for address in ("", "host", "127.0.0.1:x", "127.0.0.1:99999999"):
        with pytest.raises(PeerLost):
            asyncio.run(PeerLink.dial(address, "secret"))


def test_a_server_on_every_address_is_known_by_the_name_of_its_machine():
    async def run(host):
        server = ChunkServer("secret", AsyncRateLimit())
        try:
            return (await server.start(host)).rpartition(":")[0]
        finally:
            await server.close()

    assert asyncio.run(run("0.0.0.0")) == socket.gethostname()
    assert asyncio.run(run("127.0.0.1")) == "127.0.0.1"


def test_a_server_outlives_clients_that_vanish_in_the_middle(tmp_path):
    async def talk(link, shelf, server, address):
        rude = socket.create_connection(address.split(":"))
        rude.sendall(
            greeting(exchange.MAGIC, b"secret") + exchange._REQUEST.pack(exchange.CHUNK, MODEL, 0)
        )
        assert await asyncio.to_thread(rude.recv, 100)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        rude.close()
        assert await get(link, 0) == CONTENT[:HALF]

    exchanging(tmp_path, talk)


def test_a_rate_is_kept_by_whoever_sends(tmp_path):
    clock = FakeClock()

    async def sleep(seconds):
        clock.advance(seconds)

    async def talk(link, shelf, server, address):
        for _ in range(4):
            await get(link, 0)

    exchanging(tmp_path, talk, rate=1 << 20, clock=clock, sleep=sleep)
    assert clock.monotonic_s() == pytest.approx(4 * HALF / 2**20, abs=0.06)
