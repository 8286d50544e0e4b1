"""Exchange durable snapshots with peer nodes: send this rank's, and hold the ones of peers."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot
from holdfast.checkpoint.memory.peer_holder import PeerHolder
from holdfast.checkpoint.memory.peer_sender import Peer, Sender
from holdfast.checkpoint.memory.server import ServedSnapshot


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Name the peer of one rank, and the socket at which the rank's writing process will listen.

    The receiver of this object must close `listener`, which is already bound.

    Attributes:
        to: the peer that will hold this rank's snapshot.
        listener: the socket that receives snapshots of other ranks.
        token: the token that senders to this rank must present.
        ranks: the ranks whose snapshots this rank will hold.
    """

    to: Peer
    listener: socket.socket
    token: bytes
    ranks: tuple[int, ...]

    def message(self, max_bytes: float | None) -> dict[str, Any]:
        """Return the message that describes the pairing to the writing process.

        `max_bytes` is the argument of `Writer.pair`.
        """
        to = {
            "rank": self.to.rank,
            "host": self.to.host,
            "port": self.to.port,
            "token": self.to.token.hex(),
        }
        return {"to": to, "token": self.token.hex(), "ranks": self.ranks, "max_bytes": max_bytes}


class PeerMemory:
    """Send snapshots to the peer and hold the peers' snapshots, once `paired` is called."""

    def __init__(self, *, own_bytes: Callable[[], int], held: Callable[[int], None]) -> None:
        """Store the callbacks; `paired` starts the exchange.

        Args:
            own_bytes: returns the memory that this process's own snapshots take, in bytes.
            held: called in a thread whenever the peer holds a new snapshot, with the step of that
                snapshot.
        """
        self._own_bytes = own_bytes
        self._held = held
        self._sender: Sender | None = None
        self._holder: PeerHolder | None = None

    def paired(self, message: dict[str, Any], listener: int) -> None:
        """Start sending and holding snapshots, as `message` (from `Pairing.message`) describes.

        `listener` is the descriptor of the socket that receives snapshots.
        """
        to = message["to"]
        peer = Peer(
            rank=to["rank"], host=to["host"], port=to["port"], token=bytes.fromhex(to["token"])
        )
        self._sender = Sender(peer, sent=self._held)
        self._holder = PeerHolder(
            socket.socket(fileno=listener),
            bytes.fromhex(message["token"]),
            message["ranks"],
            max_bytes=message["max_bytes"],
            own_bytes=self._own_bytes,
        )

    def offer(self, snapshot: DurableSnapshot) -> None:
        """Send a durable snapshot to the peer, if there is a peer."""
        if self._sender is not None:
            self._sender.offer(snapshot)

    def images(self) -> list[ServedSnapshot]:
        """Return the held snapshots; see `server.Others`."""
        return [] if self._holder is None else self._holder.images()

    def give_back(self) -> None:
        """Release the held snapshots; see `server.Others`."""
        if self._holder is not None:
            self._holder.give_back()
