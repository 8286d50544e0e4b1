"""Send durable snapshots to a peer node's memory, in the background.

No save waits for a transfer or fails because of a transfer. The shared buffer that holds the
snapshot is sent directly, without a copy. If that buffer is reused for a newer snapshot during the
transfer, the transfer is abandoned. The peer never keeps a mix of two snapshots, because it
verifies every block against its digest.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot, image_bytes
from holdfast.checkpoint.memory.peer_protocol import (
    CHUNK_BYTES,
    PATIENCE_S,
    Refused,
    await_answer,
    digest_of_notes,
    head,
)

_logger = logging.getLogger("holdfast")
_SEND_BYTES: Final = CHUNK_BYTES // 4
"""The bytes sent between two checks whether the buffer still holds the snapshot."""

_OVERTAKEN: Final = "its memory was needed for a newer one before all of it was sent"


class _Overtaken(Exception):
    """Report that the buffer of the snapshot being sent was reused for a newer snapshot."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Name a rank on another node, its address, and the token that it requires."""

    rank: int
    host: str
    port: int
    token: bytes


class Sender:
    """Send the newest durable snapshot of one writing process to its peer."""

    def __init__(self, peer: Peer, *, sent: Callable[[int], None] = lambda _: None) -> None:
        """Start the thread that sends snapshots.

        Args:
            peer: the rank that receives and holds the snapshots.
            sent: called in the thread whenever the peer holds a new snapshot, with its step.
        """
        self._peer = peer
        self._sent = sent
        self._next: tuple[DurableSnapshot, memoryview] | None = None
        self._offered = threading.Condition()
        self._has_warned = False
        threading.Thread(target=self._run, name="holdfast-peer", daemon=True).start()

    def offer(self, snapshot: DurableSnapshot) -> None:
        """Queue a durable snapshot to be sent after the current transfer.

        A snapshot that is already waiting is replaced.
        """
        with self._offered:
            # Take the view now, while the arena is open: the view keeps the memory mapped.
            self._next = snapshot, snapshot.arena.image
            self._offered.notify()

    def _run(self) -> None:
        while True:
            with self._offered:
                self._offered.wait_for(lambda: self._next is not None)
                assert self._next is not None, "it was waited for"
                (snapshot, image), self._next = self._next, None
            try:
                send_snapshot(self._peer, snapshot, image)
            except _Overtaken:
                self._log_failure(snapshot, _OVERTAKEN)
            except Refused as error:
                self._log_failure(snapshot, f"rank {self._peer.rank} refused it: {error}")
            except OSError as error:
                if snapshot.is_there():
                    self._log_failure(
                        snapshot, f"rank {self._peer.rank} cannot be reached ({error})"
                    )
                else:  # the buffer no longer holds this snapshot
                    self._log_failure(snapshot, _OVERTAKEN)
            # The arena was closed: this process ends, or the trainer's state has a new shape.
            except (ValueError, AttributeError):
                continue
            else:
                self._has_warned = False
                self._sent(snapshot.order.step)
            finally:
                del snapshot, image  # so that the memory can be released

    def _log_failure(self, snapshot: DurableSnapshot, why: str) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        step, of = snapshot.order.step, snapshot.layout.rank
        _logger.log(
            level,
            "Step %d of rank %d is not in a peer node's memory: %s. The step is durable; the next "
            "save tries again.",
            *(step, of, why),
        )


def send_snapshot(peer: Peer, snapshot: DurableSnapshot, image: memoryview) -> None:
    """Send a snapshot, and wait until the peer has verified and kept it.

    Raises:
        Refused: the peer refuses the snapshot.
        OSError: the peer cannot be reached, or the connection broke.
    """
    order, layout, notes = snapshot.order, snapshot.layout, snapshot.pack_notes()
    announcement = {
        "rank": layout.rank,
        "world_size": layout.world_size,
        "step": order.step,
        "save": order.save,
        "image_bytes": image_bytes(layout),
        "notes_bytes": len(notes),
        "notes": digest_of_notes(notes),
    }
    with socket.create_connection((peer.host, peer.port), timeout=PATIENCE_S) as line:
        line.sendall(head(peer.token, announcement))
        await_answer(line)
        try:
            _send_all(line, snapshot, memoryview(notes))
            for shard in layout.shards:
                _send_all(line, snapshot, image[shard.offset : shard.offset + shard.size_bytes])
        except ConnectionError:
            with contextlib.suppress(OSError):
                await_answer(line)  # raises the holder's reason, if the holder sent one
            raise
        await_answer(line)


def _send_all(line: socket.socket, snapshot: DurableSnapshot, data: memoryview) -> None:
    for at in range(0, len(data), _SEND_BYTES):
        if not snapshot.is_there():
            raise _Overtaken
        line.sendall(data[at : at + _SEND_BYTES])
