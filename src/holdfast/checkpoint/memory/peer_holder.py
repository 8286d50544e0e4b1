"""Hold in memory the newest durable snapshot of each rank that has this rank as its peer.

A sender must present the token and be one of these ranks. A new snapshot is received into separate
memory, each block is verified against its digest, and the complete snapshot replaces the previous
one. If the memory is too small for both, the previous one is released first. This is safe because
both are durable on disk. This module needs no torch.
"""

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from holdfast.checkpoint.format.checksums import BLOCK_BYTES, DIGEST_BYTES, digests_of
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Layout
from holdfast.checkpoint.ipc.durable_snapshot import image_bytes, unpack_notes
from holdfast.checkpoint.ipc.memory_reservation import reserved
from holdfast.checkpoint.memory.peer_protocol import (
    CHUNK_BYTES,
    MAGIC,
    PATIENCE_S,
    Refused,
    answer,
    digest_of_notes,
    read_announcement,
    read_into,
)
from holdfast.checkpoint.memory.server import (
    MIN_FREE_BYTES,
    ServedSnapshot,
    SnapshotInfo,
    notes_file,
)
from holdfast.core.channel import await_greeting, receive_exactly
from holdfast.core.memory import available_memory_bytes
from holdfast.core.sockets import readable

_logger = logging.getLogger("holdfast")
_GREETING_S: Final = 5.0
"""Seconds within which a sender must present the token, after it has connected."""
_SPARE_LINES: Final = 4
"""Connections allowed beyond one for each rank, for strangers and for broken connections."""
_LOOK_EVERY_S: Final = 0.5
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 30.0
"""Seconds to wait while other processes allocate memory. A sender waits twice as long."""


@dataclass(frozen=True, kw_only=True)
class Held(ServedSnapshot):
    """Own a held snapshot; its memory is released with the last reference to this object.

    `arrival` is a number that grows with each announced snapshot, so that a newer one can be
    recognized.
    """

    arrival: int

    def __del__(self) -> None:
        for fd in (self.fd, self.notes):
            os.close(fd)


class PeerHolder:
    """Hold the snapshots that ranks of peer nodes send to this rank."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        ranks: Collection[int],
        *,
        max_bytes: float | None = None,
        own_bytes: Callable[[], int] = lambda: 0,
        free_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """Start to listen, in threads that end with the process.

        Args:
            listener: the bound socket at which senders connect.
            token: the token that senders must present.
            ranks: the ranks whose snapshots are held.
            max_bytes: the limit on the bytes of held snapshots and `own_bytes` together; None:
                limited only by the node's memory.
            own_bytes: returns the bytes that this process's own snapshots take.
            free_bytes: returns the node's free memory in bytes; below `MIN_FREE_BYTES`, all held
                snapshots are released.
        """
        self._listener = listener
        self._token = token
        self._ranks = frozenset(ranks)
        self._max_bytes = max_bytes
        self._own_bytes = own_bytes
        self._free_bytes = free_bytes
        self._held: dict[int, Held] = {}
        self._coming_bytes = 0
        self._arrivals = 0
        self._changing = threading.Lock()
        self._lines = threading.BoundedSemaphore(len(self._ranks) + _SPARE_LINES)
        listener.listen()
        listener.setblocking(False)
        threading.Thread(target=self._listen, name="holdfast-holder", daemon=True).start()

    def images(self) -> list[ServedSnapshot]:
        """Return all held snapshots; see `server.Others`."""
        with self._changing:
            return list(self._held.values())

    def give_back(self) -> None:
        """Release all held snapshots."""
        with self._changing:
            self._held.clear()

    def _listen(self) -> None:
        while True:
            ready = readable([self._listener.fileno()], _LOOK_EVERY_S)
            if self._held and self._free_bytes() < MIN_FREE_BYTES:
                _logger.warning(
                    "Released the snapshots of ranks on peer nodes: this node is short of memory."
                )
                self.give_back()
            if not ready:
                continue
            try:
                line, _address = self._listener.accept()
            except OSError:  # the sender is gone; or no descriptor is left, for a moment
                time.sleep(_PAUSE_S)
                continue
            if not self._lines.acquire(blocking=False):
                line.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()
            except RuntimeError as error:  # the process can start no more threads
                _logger.warning("Refused the snapshot of a rank on a peer node: %s", error)
                self._lines.release()
                line.close()

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                self._greet(line)
        finally:
            self._lines.release()

    def _greet(self, line: socket.socket) -> None:
        if not await_greeting(line, MAGIC, self._token, within_s=_GREETING_S):
            return
        line.settimeout(PATIENCE_S)
        try:
            self._take(line, read_announcement(line))
        except Refused as refused:
            answer(line, str(refused))
        except (ValueError, LookupError, TypeError) as error:
            answer(line, f"its data cannot be decoded ({error!r})")

    def _take(self, line: socket.socket, announced: dict[str, Any]) -> None:
        info = _snapshot_info(announced)
        if info.rank not in self._ranks:
            raise Refused(f"this is not the peer of rank {info.rank}")
        with self._room_for(info) as arrival, _memory(info) as fd:
            answer(line)
            notes = receive_exactly(
                line, info.notes_bytes, within_s=PATIENCE_S + info.notes_bytes / CHUNK_BYTES
            )
            if digest_of_notes(notes) != announced["notes"]:
                raise Refused("the notes differ from what was announced")
            layout, digests = unpack_notes(notes)
            _check_notes(info, layout, digests)
            _fill(fd, info, layout, digests, line)
            held = Held(info=info, notes=notes_file(notes), fd=os.dup(fd), arrival=arrival)
            with self._changing:
                before = self._held.get(info.rank)
                if before is None or before.arrival < arrival:
                    self._held[info.rank] = held
            del held, before
        answer(line)

    @contextlib.contextmanager
    def _room_for(self, info: SnapshotInfo) -> Iterator[int]:
        """Reserve memory within this process for one snapshot; yield its arrival number.

        Raises:
            Refused: too little memory is left, even without the rank's previous snapshot.
        """
        needed = PAGE_BYTES + info.image_bytes + info.notes_bytes
        with self._changing:
            if self._left_bytes() < needed:
                self._held.pop(info.rank, None)
            if (left := self._left_bytes()) < needed:
                raise Refused(
                    f"it needs {needed:,} bytes of memory, and {max(left, 0):,} are left for it "
                    "there"
                )
            self._coming_bytes += needed
            self._arrivals += 1
            arrival = self._arrivals
        try:
            yield arrival
        finally:
            with self._changing:
                self._coming_bytes -= needed

    def _left_bytes(self) -> int:
        # A snapshot that is arriving has not allocated its memory yet, so it is subtracted.
        left = self._free_bytes() - MIN_FREE_BYTES - self._coming_bytes
        if self._max_bytes is not None:
            held = sum(
                PAGE_BYTES + each.info.image_bytes + each.info.notes_bytes
                for each in self._held.values()
            )
            left = min(left, int(self._max_bytes) - self._own_bytes() - held - self._coming_bytes)
        return left


def _snapshot_info(announced: dict[str, Any]) -> SnapshotInfo:
    """Parse and validate the announcement of a snapshot.

    Raises:
        Refused, LookupError, TypeError: the announcement is not valid.
    """
    info = SnapshotInfo(**{name: announced[name] for name in SnapshotInfo._fields})
    numbers = (info.rank, info.world_size, info.step, info.image_bytes, info.notes_bytes)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or not isinstance(
        info.save, str
    ):
        raise Refused("its announcement is not valid")
    return info


def _check_notes(info: SnapshotInfo, layout: Layout, digests: bytes) -> None:
    """Check that the notes describe the announced snapshot, with a digest for each block.

    Raises:
        Refused: the notes do not match the announcement.
    """
    blocks = sum(-(-shard.size_bytes // BLOCK_BYTES) for shard in layout.shards)
    within = all(shard.offset >= 0 and shard.size_bytes >= 0 for shard in layout.shards)
    is_announced = (layout.rank, layout.world_size) == (info.rank, info.world_size)
    if not (
        within
        and is_announced
        and image_bytes(layout) == info.image_bytes
        and len(digests) == blocks * DIGEST_BYTES
    ):
        raise Refused("the notes do not match the announcement")


@contextlib.contextmanager
def _memory(info: SnapshotInfo) -> Iterator[int]:
    """Allocate memory for a snapshot; yield the descriptor of the memory.

    Raises:
        Refused: there is not enough memory.
    """
    needed = PAGE_BYTES + info.image_bytes
    fd = os.memfd_create("holdfast-peer", os.MFD_CLOEXEC)
    try:
        try:
            # The holders of all ranks of this node allocate at the same time.
            with reserved(needed + MIN_FREE_BYTES, patience_s=_PATIENCE_S) as free_bytes:
                if needed + MIN_FREE_BYTES > free_bytes:
                    raise Refused(
                        f"it needs {needed:,} bytes of memory, and others there take what is left"
                    )
                os.posix_fallocate(fd, 0, needed)
        except OSError as error:
            raise Refused(f"there is no memory for it there ({error.strerror})") from error
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, info: SnapshotInfo, layout: Layout, digests: bytes, line: socket.socket) -> None:
    """Receive the files of a snapshot into `fd`, and verify each block against its digest.

    Raises:
        Refused: a block does not match its digest.
        OSError: the connection broke, or the sender stopped sending.
    """
    memory = memoryview(mmap.mmap(fd, PAGE_BYTES + info.image_bytes))[PAGE_BYTES:]
    at = 0
    for shard in layout.shards:
        file = memory[shard.offset : shard.offset + shard.size_bytes]
        for begin in range(0, len(file), CHUNK_BYTES):
            chunk = file[begin : begin + CHUNK_BYTES]
            read_into(line, chunk)
            found = digests_of(chunk)
            if found != digests[at : at + len(found)]:
                raise Refused(
                    f"{shard.name} does not match its digests, in bytes {begin:,} to "
                    f"{begin + len(chunk):,}"
                )
            at += len(found)
