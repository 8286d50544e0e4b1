"""What the supervisor knows of one node, and the orders that the node's agent has not acknowledged yet."""

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
    """One node, as its agent has described it."""

    node_id: str
    name: str
    incarnation: str = ""
    address: str = ""
    preferred_rank: int | None = None
    launched: int | None = None
    """The attempt whose launcher runs there."""
    stream: Stream | None = None
    node_rank: int | None = None
    """Its place in the last launch that it took part in."""
    last_end: tuple[int, int] | None = None
    """The attempt and the return code of the launcher that ended there last."""
    seen: int = 0
    """The `seq` of its last message."""
    is_leaving: bool = False
    """Whether its scheduler ends this node alone: nothing is launched there any more."""
    is_known: bool = False
    """Whether its agent has sent all facts of the present attempt."""
    peers: dict[Peer, None] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    """Those of which a peer has been there."""
    orders: deque[dict[str, Any]] = field(default_factory=deque)
    """Those that its agent has not acknowledged."""
    away_ticks: int = 0
    silent_ticks: int = 0
    checks: Orders = field(default_factory=Orders)
    order_numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def order(self, message: Mapping[str, Any]) -> None:
        """Send an order; again to the next agent, until one has acknowledged it."""
        order = {**message, "seq": next(self.order_numbers)}
        self.orders.append(order)
        if self.stream is not None:
            self.stream.send(order)

    def acknowledged(self, seq: int) -> None:
        """Take in that the agent has carried out the orders up to a number."""
        while self.orders and self.orders[0]["seq"] <= seq:
            self.orders.popleft()
