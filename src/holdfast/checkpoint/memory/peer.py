"""Send a rank's durable snapshots to a peer node's memory, and hold the peers' snapshots here."""

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
    """The peer of one rank, and the socket at which the rank's own writing process will listen.

    The receiver of this object closes `listener`, which is bound.

    Attributes:
        to: the peer that will hold this rank's snapshot.
        listener: the socket for snapshots of other ranks.
        token: the token that senders to this rank must present.
        ranks: the ranks whose snapshots this rank will hold.
    """

    to: Peer
    listener: socket.socket
    token: bytes
    ranks: tuple[int, ...]

    def message(self, max_bytes: float | None) -> dict[str, Any]:
        """Return the message to the writing process; `max_bytes` as in `Writer.pair`."""
        to = {
            "rank": self.to.rank,
            "host": self.to.host,
            "port": self.to.port,
            "token": self.to.token.hex(),
        }
        return {"to": to, "token": self.token.hex(), "ranks": self.ranks, "max_bytes": max_bytes}


class PeerMemory:
    """The writing process's memory exchange with peer nodes; inactive until `paired`."""

    def __init__(self, *, own_bytes: Callable[[], int], held: Callable[[int], None]) -> None:
        """Start nothing.

        Args:
            own_bytes: returns the memory that this process's own snapshots take, in bytes.
            held: called with the step that the peer holds from now on, in a thread.
        """
        self._own_bytes = own_bytes
        self._held = held
        self._sender: Sender | None = None
        self._holder: PeerHolder | None = None

    def paired(self, message: dict[str, Any], listener: int) -> None:
        """Start to send and to hold snapshots; `message` is a message of `Pairing.message`."""
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
