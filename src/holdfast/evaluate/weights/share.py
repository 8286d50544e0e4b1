"""Collect the chunks of one model on one node, from the source and from peers.

The node reads its own chunks from the source, several at the same time, and requests the others
from their owners, over one connection to each owner. If an owner is gone, silent or sends corrupt
data, its chunks come from another node that has them, and otherwise from the source. So the fetch
ends either with the whole model or with one error.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import xxhash

from holdfast.core.rate_limit import AsyncRateLimit
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import DamagedModel, ModelManifest
from holdfast.evaluate.weights.exchange import CorruptedChunk, PeerHasNot, PeerLink, PeerLost
from holdfast.evaluate.weights.source import Sleep, Source
from holdfast.evaluate.weights.store import SharedFile, SharedMemory, is_full

_logger = logging.getLogger("holdfast")

READS_AT_ONCE = 8
PART_BYTES = 8 * 1024 * 1024
"""The size of one read within a chunk, so that a failed read repeats little.

At most 8 such reads are in memory at the same time.
"""
LIMITED_PART_BYTES = 1024 * 1024
"""The size of one read under a rate limit, which is smaller, so that other reads wait less."""
PEER_ATTEMPTS = 3
RESEND_S = 1.0
PATIENCE_S = 5.0
"""The seconds to wait for new owners after a peer was lost.

After that, the lost peer's chunks are fetched from elsewhere.
"""


class ModelShare:
    """Hold the chunks of a model on this node; implements `exchange.Shelf`.

    Args:
        manifest: the model.
        files: the model's files in shared memory, in the manifest's order.
        memory: the shared memory that holds the files.
        source: the source to read from.
        held: the same files in the memory of a training job on this node; None if there are none.
            Bytes from there do not count as remote.
        token: the evaluation's token.
        nic_in: the rate limit on all data that this node receives.
        budget: the rate limit of this model.
        sleep: the function that waits.
    """

    def __init__(
        self,
        manifest: ModelManifest,
        files: Sequence[SharedFile],
        memory: SharedMemory,
        source: Source,
        held: Source | None,
        token: str,
        nic_in: AsyncRateLimit,
        budget: AsyncRateLimit,
        sleep: Sleep,
    ) -> None:
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint()
        self.remote_bytes = 0
        self.peer_bytes = 0
        self.budget = budget
        self._sleep = sleep
        self._files = list(files)
        self._memory = memory
        self._source = source
        self._held = held
        self._token = token
        self._nic_in = nic_in
        self._digests: list[bytes | None] = [None] * len(manifest.chunks)
        self._missing = set(range(len(manifest.chunks)))
        self._owners: list[int] = []
        self._peers: dict[int, str] = {}
        self._node = -1
        self._todo: dict[int, deque[int]] = {}
        self._under_way: set[int] = set()
        self._corrupt: dict[int, int] = {}
        self._finished: set[int] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._askers: dict[int, asyncio.Task[None]] = {}
        self._sharing_out = asyncio.Lock()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False

    # For the peers

    async def wait_for(self, chunk: int) -> bytes:
        """See `Shelf.wait_for`."""
        while True:
            if self._closed or self._error is not None or not 0 <= chunk < len(self._digests):
                raise PeerHasNot
            if (digest := self._digests[chunk]) is not None:
                return digest
            await self._changed.wait()

    def place(self, chunk: int) -> tuple[SharedFile, int, int]:
        """See `Shelf.place`."""
        cut = self.manifest.chunks[chunk]
        return self._files[cut.file], cut.offset, cut.size_bytes

    def held(self) -> bytes:
        """See `Shelf.held`."""
        bits = bytearray((len(self._digests) + 7) // 8)
        for number, digest in enumerate(self._digests):
            if digest is not None and not self._closed:
                bits[number // 8] |= 1 << (number % 8)
        return bytes(bits)

    def finished(self, node: int) -> None:
        """See `Shelf.finished`."""
        self._finished.add(node)
        self._notify()

    # For this node

    async def share_out(self, owners: Sequence[int], peers: Mapping[int, str], node: int) -> None:
        """Continue the fetch with new owners and peers.

        A chunk that a peer already has is requested from the peer instead of being read from the
        source.
        """
        async with self._sharing_out:
            again = bool(self._owners)
            gone = [asker for asker in self._askers if peers.get(asker) != self._peers.get(asker)]
            await _end([self._askers.pop(asker) for asker in gone])
            self._owners, self._peers, self._node = list(owners), dict(peers), node
            if again and any(
                self._owners[chunk] == node for chunk in self._missing - self._under_way
            ):
                await self._reassign_missing(lambda owner: owner == node)
            self._plan()

    async def complete(self) -> list[bytes]:
        """Wait until this node has every chunk of the model; return the digests of the chunks.

        Raises:
            EvaluationError: a chunk could be fetched neither from storage nor from another node, or
                the model was released.
        """
        while self._missing:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise EvaluationError("The model was released before it was fetched completely.")
            await self._changed.wait()
        return [digest for digest in self._digests if digest is not None]

    async def say_finished(self) -> None:
        """Announce to all peers that this node has all chunks, and wait until all peers do so too.

        A node that left is not waited for once the coordinator has removed it from the peers.
        """
        informed: set[int] = set()
        while not self._closed:
            others = self._peers.keys() - {self._node}
            for peer in others - informed:
                # Try again a peer that is absent or does not have the model yet.
                with contextlib.suppress(PeerLost, PeerHasNot):
                    link = await PeerLink.dial(self._peers[peer], self._token)
                    with contextlib.closing(link):
                        await link.say_finished(self.fingerprint, self._node)
                    informed.add(peer)
            if others <= informed & self._finished and others == self._peers.keys() - {self._node}:
                return
            if others <= informed:
                await self._changed.wait()
            else:
                await self._sleep(RESEND_S)

    async def close(self) -> None:
        """Stop fetching and serving chunks."""
        self._closed = True
        self._notify()
        await _end([*self._readers, *self._askers.values()])
        self._readers, self._askers = [], {}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _plan(self) -> None:
        """Queue the missing chunks by owner, and start a task for each owner."""
        self._todo = {}
        for chunk in sorted(self._missing - self._under_way):
            owner = self._owners[chunk] if self._owners[chunk] in self._peers else self._node
            self._todo.setdefault(owner, deque()).append(chunk)
        if not self._readers and not self._closed:
            self._readers = [asyncio.ensure_future(self._read_own()) for _ in range(READS_AT_ONCE)]
        for peer in self._todo:
            if (
                peer != self._node
                and (peer not in self._askers or self._askers[peer].done())
                and not self._closed
            ):
                self._askers[peer] = asyncio.ensure_future(self._ask(peer, self._peers[peer]))
        self._notify()

    def _next(self, owner: int) -> int | None:
        todo = self._todo.get(owner)
        if not todo:
            return None
        self._under_way.add(todo[0])
        return todo.popleft()

    def _put_back(self, chunk: int) -> None:
        """Queue a chunk again whose fetch failed, for its present owner."""
        self._under_way.discard(chunk)
        self._plan()

    def _put(self, chunk: int, digest: bytes) -> None:
        self._digests[chunk] = digest
        self._missing.discard(chunk)
        self._notify()

    async def _read_own(self) -> None:
        while True:
            chunk = self._next(self._node)
            if chunk is None:
                await self._changed.wait()
                continue
            try:
                self._put(chunk, await self._read(chunk))
            except Exception as error:  # raised in `complete`
                self._fail(error)
                return
            finally:
                self._under_way.discard(chunk)

    async def _read(self, chunk: int) -> bytes:
        cut = self.manifest.chunks[chunk]
        path = self.manifest.files[cut.file].path
        for _ in range(PEER_ATTEMPTS):
            checksum = xxhash.xxh3_128()
            part_bytes = (
                LIMITED_PART_BYTES
                if self._nic_in.is_limited or self.budget.is_limited
                else PART_BYTES
            )
            for start in range(0, cut.size_bytes, part_bytes):
                count = min(part_bytes, cut.size_bytes - start)
                data = await self._read_part(path, cut.offset + start, count)
                await in_a_thread(partial(self._keep, cut.file, data, cut.offset + start, checksum))
            if self._is_right(chunk, checksum.digest()):
                return checksum.digest()
            self._held = None
        raise DamagedModel(
            f"{self.manifest.source}: bytes {cut.offset} to {cut.offset + cut.size_bytes} of "
            f"{path} do not match their "
            "checksum: the file is damaged. Restore it, or evaluate another checkpoint."
        )

    async def _read_part(self, path: str, offset: int, size_bytes: int) -> memoryview:
        if self._held is not None:
            try:
                return await self._held.read(path, offset, size_bytes)
            except (OSError, EvaluationError) as error:
                _logger.info("Released the loaded part of %s: %s", self.manifest.source, error)
                self._held = None
        await self._take(size_bytes)
        try:
            data = await self._source.read(path, offset, size_bytes)
        except OSError as error:
            raise EvaluationError(
                f"{self.manifest.source} has no {path} that {socket.gethostname()} can read "
                f"({error.strerror}). "
                "Give a folder that every node sees, or a URL."
            ) from error
        self.remote_bytes += size_bytes
        return data

    def _keep(
        self, file: int, data: memoryview, offset: int, checksum: "xxhash.xxh3_128 | None" = None
    ) -> None:
        try:
            self._files[file].write(data, offset)
        except OSError as error:
            if is_full(error):
                raise self._memory.full(data.nbytes) from error
            raise
        if checksum is not None:
            checksum.update(data)

    async def _take(self, size_bytes: int) -> None:
        await self.budget.wait(size_bytes)
        await self._nic_in.wait(size_bytes)

    def _is_right(self, chunk: int, digest: bytes) -> bool:
        return not self.manifest.digests or digest.hex() == self.manifest.digests[chunk]

    async def _ask(self, peer: int, address: str) -> None:
        """Fetch chunks from a peer until none of its chunks is missing or the peer is lost."""
        failures = 0
        link: PeerLink | None = None
        try:
            while failures < PEER_ATTEMPTS and (chunk := self._next(peer)) is not None:
                pause_s = 0.0
                try:
                    link = link or await PeerLink.dial(address, self._token)
                    await self._get(link, chunk)
                    failures = 0
                except PeerHasNot:
                    failures = PEER_ATTEMPTS
                    self._put_back(chunk)
                except PeerLost:
                    failures += 1
                    self._put_back(chunk)
                    _hang_up(link)
                    link = None
                    # Pause also after the last attempt: new owners may come during the pause, and
                    # end this task.
                    pause_s = PATIENCE_S if failures == PEER_ATTEMPTS else 0.1 * 2**failures
                except CorruptedChunk:
                    self._corrupt[chunk] = self._corrupt.get(chunk, 0) + 1
                    if self._corrupt[chunk] >= PEER_ATTEMPTS:
                        self._owners[chunk] = self._node
                    self._put_back(chunk)
                finally:
                    self._under_way.discard(chunk)
                if pause_s:
                    await self._sleep(pause_s)
            if self._todo.get(peer):
                await self._give_up(peer)
        except Exception as error:  # raised in `complete`
            self._fail(error)
        finally:
            _hang_up(link)

    async def _get(self, link: PeerLink, chunk: int) -> None:
        file, offset, size_bytes = self.place(chunk)
        number = self._files.index(file)

        def write(data: memoryview, at: int) -> None:
            self._keep(number, data, offset + at)

        digest = await link.chunk(self.fingerprint, chunk, size_bytes, write, self._take)
        if not self._is_right(chunk, digest):
            raise CorruptedChunk
        self.peer_bytes += size_bytes
        self._put(chunk, digest)

    async def _give_up(self, peer: int) -> None:
        """Fetch a lost peer's chunks from other nodes that have them, or from the source."""
        await self._reassign_missing(lambda owner: owner == peer, without=peer)
        self._askers.pop(peer, None)
        self._plan()

    async def _reassign_missing(
        self, concerns: Callable[[int], bool], *, without: int = -1
    ) -> None:
        """Reassign the missing chunks of all owners for which `concerns` returns True.

        The new owner of a chunk is a peer that has it; if there is none, this node.
        """
        others = [peer for peer in self._peers if peer not in (self._node, without)]
        found = await asyncio.gather(*(self._held_by(peer) for peer in others))
        turn = 0
        for chunk in sorted(self._missing - self._under_way):
            if concerns(self._owners[chunk]):
                holders = [peer for peer, held in zip(others, found, strict=True) if chunk in held]
                self._owners[chunk] = holders[turn % len(holders)] if holders else self._node
                turn += 1

    async def _held_by(self, peer: int) -> set[int]:
        try:
            link = await PeerLink.dial(self._peers[peer], self._token)
            with contextlib.closing(link):
                return await link.held(self.fingerprint, len(self.manifest.chunks))
        except (PeerLost, PeerHasNot):
            return set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._notify()


def _hang_up(link: PeerLink | None) -> None:
    if link is not None:
        link.close()


async def in_a_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait until it has ended, even if this task is cancelled.

    The wait is needed because `work` writes to files that the caller frees afterwards.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def _end(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
