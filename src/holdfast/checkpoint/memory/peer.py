"""A writing process's part in the memory of peers: what it sends to one, and what it holds for others."""

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
    """What one rank's writing process has to know; `listener` is bound. Closing that is up to whoever got this."""

    to: Peer
    listener: socket.socket
    token: bytes
    ranks: tuple[int, ...]

    def message(self, max_bytes: float | None) -> dict[str, Any]:
        """For the writing process; `max_bytes` as for `Writer.pair`."""
        to = {
            "rank": self.to.rank,
            "host": self.to.host,
            "port": self.to.port,
            "token": self.to.token.hex(),
        }
        return {"to": to, "token": self.token.hex(), "ranks": self.ranks, "max_bytes": max_bytes}


class PeerMemory:
    """Nothing, until the trainer says who the peer is."""

    def __init__(self, *, own_bytes: Callable[[], int], held: Callable[[int], None]) -> None:
        """Nothing is started.

        Args:
            own_bytes: what this process's own snapshots take.
            held: told the step that the peer holds from now on.
        """
        self._own_bytes = own_bytes
        self._held = held
        self._sender: Sender | None = None
        self._holder: PeerHolder | None = None

    def paired(self, told: dict[str, Any], listener: int) -> None:
        """The trainer says who the peer is; see `Pairing.message`."""
        to = told["to"]
        peer = Peer(
            rank=to["rank"], host=to["host"], port=to["port"], token=bytes.fromhex(to["token"])
        )
        self._sender = Sender(peer, sent=self._held)
        self._holder = PeerHolder(
            socket.socket(fileno=listener),
            bytes.fromhex(told["token"]),
            told["ranks"],
            max_bytes=told["max_bytes"],
            own_bytes=self._own_bytes,
        )

    def offer(self, snapshot: DurableSnapshot) -> None:
        """A snapshot is durable: the peer is to hold it, if there is one."""
        if self._sender is not None:
            self._sender.offer(snapshot)

    def images(self) -> list[ServedSnapshot]:
        """See `keeping.Others`."""
        return [] if self._holder is None else self._holder.images()

    def give_back(self) -> None:
        """See `keeping.Others`."""
        if self._holder is not None:
            self._holder.give_back()
