"""What became durable goes to a peer node's memory, in the background: no save waits for it, and none fails for it.

The arena is sent as it lies there. Where it is needed for a newer snapshot before all of it is sent, it is left out:
the holder compares every block with its digest, and keeps the one before.
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
"""After each it is looked whether the arena still holds what is sent."""

_OVERTAKEN: Final = "its memory was needed for a newer one before all of it was sent"


class _Overtaken(Exception):
    """A newer snapshot needs the memory of what is being sent."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank on another node: where it listens, and the token that it wants to see."""

    rank: int
    host: str
    port: int
    token: bytes


class Sender:
    """Sends what one writing process committed last, always the newest."""

    def __init__(self, peer: Peer, *, sent: Callable[[int], None] = lambda _: None) -> None:
        """Nothing is sent before there is something to send.

        Args:
            peer: to whom.
            sent: told the step of what the peer holds from now on; called in a thread.
        """
        self._peer = peer
        self._sent = sent
        self._next: tuple[DurableSnapshot, memoryview] | None = None
        self._offered = threading.Condition()
        self._has_told = False
        threading.Thread(target=self._run, name="holdfast-peer", daemon=True).start()

    def offer(self, snapshot: DurableSnapshot) -> None:
        """It is durable; send it once what is being sent has been."""
        with self._offered:
            # Now, while it is open: a view keeps the memory mapped.
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
                self._tell(snapshot, _OVERTAKEN)
            except Refused as error:
                self._tell(snapshot, f"rank {self._peer.rank} does not take it: {error}")
            except OSError as error:
                if snapshot.is_there():
                    self._tell(snapshot, f"rank {self._peer.rank} cannot be reached ({error})")
                else:  # what it had of it was not right any more
                    self._tell(snapshot, _OVERTAKEN)
            except (
                ValueError,
                AttributeError,
            ):  # this process ends, or the trainer's state has another shape
                continue
            else:
                self._has_told = False
                self._sent(snapshot.order.step)
            finally:
                del snapshot, image  # the memory may be given back

    def _tell(self, snapshot: DurableSnapshot, why: str) -> None:
        level = logging.DEBUG if self._has_told else logging.WARNING
        self._has_told = True
        step, of = snapshot.order.step, snapshot.layout.rank
        _logger.log(
            level,
            "Step %d of rank %d is not held in a peer node's memory: %s. It is durable; the next save is tried again.",
            *(step, of, why),
        )


def send_snapshot(peer: Peer, snapshot: DurableSnapshot, image: memoryview) -> None:
    """Send one; once it returns the peer holds it.

    Raises:
        Refused: the peer does not take it.
        OSError: it cannot be reached.
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
                await_answer(line)  # why it has ended the connection, where it said so
            raise
        await_answer(line)


def _send_all(line: socket.socket, snapshot: DurableSnapshot, data: memoryview) -> None:
    for at in range(0, len(data), _SEND_BYTES):
        if not snapshot.is_there():
            raise _Overtaken
        line.sendall(data[at : at + _SEND_BYTES])
