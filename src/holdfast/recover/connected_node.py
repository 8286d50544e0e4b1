"""The supervisor's record of one node, with the orders not acknowledged by the node's agent."""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.recover.agent.stream import Stream
from holdfast.recover.channel import Peer
from holdfast.recover.localise.orders import Orders


@dataclass(eq=False, kw_only=True)
class Node:
    """One node, by the description from its agent."""

    node_id: str
    name: str
    incarnation: str = ""
    address: str = ""
    preferred_rank: int | None = None
    launched: int | None = None
    """The attempt whose launcher runs on the node."""
    stream: Stream | None = None
    node_rank: int | None = None
    """The node's place in its last launch."""
    last_end: tuple[int, int] | None = None
    """The attempt and the return code of the launcher that ended last on the node."""
    seen: int = 0
    """The `seq` of the last message from the node's agent."""
    is_leaving: bool = False
    """True if the scheduler ends this node alone: no job is launched on the node any more."""
    is_known: bool = False
    """True once the node's agent has sent all facts of the present attempt."""
    peers: dict[Peer, None] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    """The ranks from which a peer has connected on the node."""
    orders: deque[dict[str, Any]] = field(default_factory=deque)
    """The orders that the node's agent has not acknowledged."""
    away_ticks: int = 0
    silent_ticks: int = 0
    checks: Orders = field(default_factory=Orders)
    order_numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def order(self, message: Mapping[str, Any]) -> None:
        """Send an order, and send it again to the next agent until an agent has acknowledged it."""
        order = {**message, "seq": next(self.order_numbers)}
        self.orders.append(order)
        if self.stream is not None:
            self.stream.send(order)

    def acknowledged(self, seq: int) -> None:
        """Drop the orders up to a number, which the agent has carried out."""
        while self.orders and self.orders[0]["seq"] <= seq:
            self.orders.popleft()
