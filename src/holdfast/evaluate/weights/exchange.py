"""Exchange chunks between nodes, by a server on each node and connections to it.

A connection begins with a greeting (see `core.channel`) that contains the evaluation's token. The
server closes a connection without such a greeting and reads nothing from it. Then requests follow,
one at a time:

    request:  kind (1 byte), the model's fingerprint (16), a number (4)
    reply:    state (1 byte), XXH3-128 (16), size in bytes (8), and the body of this size

`CHUNK` requests chunk `number`. `HELD` requests the list of present chunks, one bit for each.
`FINISHED` announces that node `number` needs no more chunks of this model. Until a requested chunk
is present, the server sends `WAIT` once a second, so that a longer silence means that the server
hangs. All integers are little endian. Received data is never executed, and all sizes are limited.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

import xxhash

from holdfast.core.channel import HungUp, greeting, is_greeted, sock_receive
from holdfast.core.rate_limit import AsyncRateLimit
from holdfast.evaluate.weights.store import SharedFile

_logger = logging.getLogger("holdfast")

MAGIC = b"HFC2"
MAX_CHUNK_BYTES = 1 << 32
WAIT_EVERY_S = 1.0
SILENCE_S = 10.0
"""The seconds of silence after which a peer counts as hung."""
UNKNOWN_MODEL_S = 60.0
"""The seconds for which a request waits at a node that was not yet ordered to fetch the model."""
CHUNK, HELD, FINISHED = 1, 2, 3
WAIT, HERE, GONE = 0, 1, 2

_REQUEST = struct.Struct("<B16sI")
_REPLY = struct.Struct("<B16sQ")
_SLICE_BYTES = 8 * 1024 * 1024
_LIMITED_SLICE_BYTES = 256 * 1024
_RECEIVE_BYTES = 256 * 1024


class PeerLost(Exception):
    """The peer does not answer, hangs or broke the protocol."""


class PeerHasNot(Exception):
    """The peer does not have the requested chunk, and will not get it."""


class CorruptedChunk(Exception):
    """The received bytes differ from their digest."""


class Shelf(Protocol):
    """The chunks of one model on a node, as the node's server uses them."""

    async def wait_for(self, chunk: int) -> bytes:
        """Wait until a chunk is present, and return its digest.

        Raises:
            PeerHasNot: the chunk will not come.
        """
        ...

    def place(self, chunk: int) -> tuple[SharedFile, int, int]:
        """Return the file of a present chunk, and the chunk's offset and size in bytes."""
        ...

    def held(self) -> bytes:
        """Return a bit for each chunk, which is set if the chunk is present.

        Chunk `i` has bit `i % 8` of byte `i // 8`.
        """
        ...

    def finished(self, node: int) -> None:
        """Record that a node needs no more chunks of this model."""
        ...


class ChunkServer:
    """Serve the chunks of this node's models to other nodes."""

    def __init__(self, token: str, outbound: AsyncRateLimit) -> None:
        self.sent_bytes = 0
        self._shelves: dict[bytes, Shelf] = {}
        self._taken_away: set[bytes] = set()
        self._token = token.encode()
        self._outbound = outbound
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`.

        Returns:
            host:port for the peers; if `host` means any address, with the machine's name.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        name = (
            socket.gethostname()
            if host in ("", "0.0.0.0", "::")
            else f"[{host}]"
            if ":" in host
            else host
        )
        return f"{name}:{self._listener.getsockname()[1]}"

    def show(self, fingerprint: bytes, shelf: Shelf) -> None:
        """Start to serve the chunks of a model."""
        self._shelves[fingerprint] = shelf
        self._taken_away.discard(fingerprint)

    def take_away(self, fingerprint: bytes, shelf: Shelf) -> None:
        """Stop serving a model, and refuse waiting requests at once."""
        if self._shelves.get(fingerprint) is shelf:
            del self._shelves[fingerprint]
            self._taken_away.add(fingerprint)

    async def close(self) -> None:
        """Close every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is left, or the peer hung up already
                _logger.warning("A node could not connect for chunks: %s.", error)
                await asyncio.sleep(WAIT_EVERY_S)
                continue
            peer.setblocking(False)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        # The peer may be gone, or may be no peer of this evaluation.
        with peer, contextlib.suppress(OSError):
            async with asyncio.timeout(SILENCE_S):
                if not await is_greeted(peer, MAGIC, self._token):
                    return
            while True:
                kind, fingerprint, number = _REQUEST.unpack(await sock_receive(peer, _REQUEST.size))
                if not await self._answer(peer, kind, fingerprint, number):
                    return

    async def _answer(
        self, peer: socket.socket, kind: int, fingerprint: bytes, number: int
    ) -> bool:
        """Answer one request; return False if the request is malformed."""
        loop = asyncio.get_running_loop()
        if kind == CHUNK:
            await self._answer_chunk(peer, fingerprint, number)
            return True
        if kind not in (HELD, FINISHED):
            return False
        shelf = self._shelves.get(fingerprint)
        body = b""
        if shelf is not None and kind == HELD:
            body = shelf.held()
        elif shelf is not None:
            shelf.finished(number)
        state = GONE if shelf is None else HERE
        await loop.sock_sendall(
            peer, _REPLY.pack(state, xxhash.xxh3_128_digest(body), len(body)) + body
        )
        return True

    async def _answer_chunk(self, peer: socket.socket, fingerprint: bytes, number: int) -> None:
        loop = asyncio.get_running_loop()
        finding = asyncio.ensure_future(self._find(fingerprint, number))
        try:
            while not (await asyncio.wait([finding], timeout=WAIT_EVERY_S))[0]:
                await loop.sock_sendall(peer, _REPLY.pack(WAIT, bytes(16), 0))
            shelf, digest = finding.result()
        except PeerHasNot:
            await loop.sock_sendall(peer, _REPLY.pack(GONE, bytes(16), 0))
            return
        finally:
            finding.cancel()
        file, offset, size_bytes = shelf.place(number)
        await loop.sock_sendall(peer, _REPLY.pack(HERE, digest, size_bytes))
        end = offset + size_bytes
        slice_bytes = _LIMITED_SLICE_BYTES if self._outbound.is_limited else _SLICE_BYTES
        while offset < end:
            count = min(slice_bytes, end - offset)
            await self._outbound.wait(count)
            sent = await loop.sock_sendfile(peer, file, offset, count)  # type: ignore[arg-type]
            if not sent:
                raise HungUp
            offset += sent
            self.sent_bytes += sent

    async def _find(self, fingerprint: bytes, number: int) -> tuple[Shelf, bytes]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_MODEL_S):
                while fingerprint not in self._shelves and fingerprint not in self._taken_away:
                    await asyncio.sleep(WAIT_EVERY_S / 10)
        shelf = self._shelves.get(fingerprint)
        if shelf is None:
            raise PeerHasNot
        return shelf, await shelf.wait_for(number)


class PeerLink:
    """A connection to the chunk server of another node."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    @classmethod
    async def dial(cls, address: str, token: str) -> "PeerLink":
        """Connect to host:port.

        Raises:
            PeerLost: no server answers.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SILENCE_S):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                family, kind, protocol, _, where = found[0]
                peer = socket.socket(family, kind, protocol)
                try:
                    peer.setblocking(False)
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.sock_connect(peer, where)
                    await loop.sock_sendall(peer, greeting(MAGIC, token.encode()))
                except BaseException:
                    peer.close()
                    raise
        except (OSError, ValueError, TimeoutError) as error:
            raise PeerLost(f"{address}: {error}") from error
        return cls(peer)

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()

    async def chunk(
        self,
        fingerprint: bytes,
        number: int,
        size_bytes: int,
        write: Callable[[memoryview, int], None],
        take: Callable[[int], Awaitable[None]],
    ) -> bytes:
        """Request a chunk and pass its bytes to `write`.

        `write(data, offset)` receives the bytes with their offset in the chunk; `data` is valid
        only during the call. `take(bytes)` is awaited before bytes are received, to limit the rate.

        Returns:
            The digest of the chunk.

        Raises:
            PeerHasNot: the peer does not have the chunk, and will not get it.
            CorruptedChunk: the bytes differ from their digest.
            PeerLost: the peer is gone, hangs, or violated the protocol.
        """
        digest, announced_bytes = await self._ask(CHUNK, fingerprint, number)
        if announced_bytes != size_bytes:
            raise PeerLost(f"{announced_bytes} bytes were announced instead of {size_bytes}")
        checksum = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_RECEIVE_BYTES, size_bytes)))
        offset = 0
        while offset < size_bytes:
            wanted = min(len(buffer), size_bytes - offset)
            await take(wanted)
            filled = 0
            while filled < wanted:
                filled += await self._receive_into(buffer[filled:wanted])
            checksum.update(buffer[:filled])
            write(buffer[:filled], offset)
            offset += filled
        if checksum.digest() != digest:
            raise CorruptedChunk
        return digest

    async def held(self, fingerprint: bytes, chunks: int) -> set[int]:
        """Return the numbers of the chunks that the peer has now.

        `chunks` is the number of chunks of the model.

        Raises:
            PeerHasNot: the peer does not have the model.
            PeerLost: the peer is gone, hangs, or violated the protocol.
        """
        _, size_bytes = await self._ask(HELD, fingerprint, 0)
        if size_bytes > (chunks + 7) // 8:
            raise PeerLost(f"{size_bytes} bytes were announced")
        bits = bytearray(size_bytes)
        filled = 0
        while filled < size_bytes:
            filled += await self._receive_into(memoryview(bits)[filled:])
        return {
            number
            for number in range(min(chunks, 8 * size_bytes))
            if bits[number // 8] >> (number % 8) & 1
        }

    async def say_finished(self, fingerprint: bytes, node: int) -> None:
        """Announce to the peer that node `node` needs no more chunks of the model.

        Raises:
            PeerHasNot: the peer does not have the model.
            PeerLost: the peer is gone or hangs.
        """
        await self._ask(FINISHED, fingerprint, node)

    async def _ask(self, kind: int, fingerprint: bytes, number: int) -> tuple[bytes, int]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._peer, _REQUEST.pack(kind, fingerprint, number))
        except OSError as error:
            raise PeerLost(str(error)) from error
        reply = bytearray(_REPLY.size)
        while True:
            filled = 0
            while filled < len(reply):
                filled += await self._receive_into(memoryview(reply)[filled:])
            state, digest, size_bytes = _REPLY.unpack(reply)
            if state == HERE and size_bytes <= MAX_CHUNK_BYTES:
                return digest, size_bytes
            if state == GONE:
                raise PeerHasNot
            if state != WAIT:
                raise PeerLost("it does not speak this protocol")

    async def _receive_into(self, buffer: memoryview) -> int:
        try:
            async with asyncio.timeout(SILENCE_S):
                count = await asyncio.get_running_loop().sock_recv_into(self._peer, buffer)
        except TimeoutError as error:
            raise PeerLost(f"nothing was received for {SILENCE_S:.0f} s") from error
        except OSError as error:
            raise PeerLost(str(error)) from error
        if not count:
            raise PeerLost("it hung up")
        return count
