"""Track one node in the supervisor, and decide if the node is lost.

A node counts as lost in one of four cases. All times are counted in the supervisor's own ticks.

- The connection of its agent has ended, and no new one is made. The end of a killed agent is not
  enough, since the node's process holds the connection open.
- Its host has acknowledged no byte for some time, for example because it has no power. The kernel
  sends acknowledgements, so a frozen agent does not lead to this case. However, if the ranks of
  other nodes still complete steps, the node must be alive, since ranks wait for each other; then
  only the connection of the supervisor is cut. The time limit grows with the length of the job's
  steps, so that the other ranks have enough time to complete steps.
- Its agent is silent for longer than the time after which a frozen agent would have been replaced.
- Its launcher does not end by SIGKILL, for example because the process is blocked in the kernel.
  Such a node is stuck, and can be used again after the launcher has ended.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.whole import whole_number
from holdfast.recover.agent.stream import Stream
from holdfast.recover.channel import Peer
from holdfast.recover.localise.orders import Orders

AWAY_TICKS = 100
"""A node is lost this number of ticks after the connection of its agent has ended."""
AWAY_TICKS_WITH_SPARE = 5
"""If a spare can take its place, a node is lost this number of ticks after the connection of its
agent has ended. The time can be short, since the connection ends with the node, and not with a
killed agent (see `agent.held_connection`)."""
HEARD_TICKS = 20
"""A node counts as silent after this number of ticks without a message. An agent sends a message
each second.
"""
PROBE_TICKS = 10
"""The number of ticks between two probes of a silent node. A probe is a message that the node's
kernel must acknowledge.
"""
DEAF_TICKS = 90
"""A node is lost after this number of consecutive ticks without an acknowledgement, counted from
the first probe. The detection takes ten seconds in total."""
SILENT_TICKS = 450
"""A node is lost after this number of ticks without a message of its agent, even if its kernel
acknowledges. A frozen agent would have been killed and replaced before."""
ENDING_TICKS = 600
"""A node counts as stuck this number of ticks after the order to end its launcher."""
LEFT = {
    "kind": "end",
    "state": "stopped",
    "exit_code": 4,
    "outcome": "Stopped by SIGTERM, on this node alone.",
}
"""The last message to a node that its scheduler ends, while the run continues."""
MORE_STEPS = 2
"""A node is alive if the ranks of other nodes complete this number of steps. One step is not
enough, since ranks may complete a step after another rank has died."""


class Pace:
    """Measures how many ticks a step of the job takes."""

    def __init__(self) -> None:
        self._reached = (0, 0)
        self._ticks = 0
        """The ticks since the last step."""
        self.step_ticks = 0.0
        """The ticks of the last step; 0 before a second step."""

    def tick(self, reached: tuple[int, int]) -> None:
        """Count a tick; `reached` is the attempt, and the highest step of the job in it."""
        self._ticks += 1
        if reached > self._reached:
            (attempt, step), (before, step_before) = reached, self._reached
            if attempt == before:
                self.step_ticks = self._ticks / (step - step_before)
            self._reached, self._ticks = reached, 0


@dataclass(eq=False, kw_only=True)
class Node:
    """One node, as its agent has described it."""

    node_id: str
    name: str
    incarnation: str = ""
    address: str = ""
    preferred_rank: int | None = None
    launched: int | None = None
    """The attempt whose launcher runs on the node."""
    stream: Stream | None = None
    node_rank: int | None = None
    """The rank of the node in its last launch."""
    last_end: tuple[int, int] | None = None
    """The attempt and the return code of the launcher that ended last on the node."""
    seen: int = 0
    """The `seq` of the last message from the node's agent."""
    is_leaving: bool = False
    """True if the scheduler ends this node while the run continues, so that no job is launched on
    it any more.
    """
    is_known: bool = False
    """True once the agent has sent all facts about the present attempt."""
    peers: dict[Peer, None] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    """The ranks on the node of which a process has connected."""
    orders: deque[dict[str, Any]] = field(default_factory=deque)
    """The orders that the node's agent has not acknowledged."""
    away_ticks: int = 0
    silent_ticks: int = 0
    """The number of ticks since the last message of the agent."""
    deaf_ticks: int = 0
    """The number of consecutive ticks in which the host has acknowledged nothing."""
    ending_ticks: int | None = None
    """The number of ticks since the order to end the launcher; None if there was no order."""
    reached: tuple[int, int] = (0, 0)
    """The attempt, and the highest step in it that the node's ranks have reported."""
    others_reached: tuple[int, int] = (0, 0)
    """The attempt, and the highest step in it of all nodes, as of the last sign of life of this
    node.
    """
    checks: Orders = field(default_factory=Orders)
    order_numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def order(self, message: Mapping[str, Any]) -> None:
        """Send an order, and repeat it to later agents until an agent has acknowledged it."""
        order = {**message, "seq": next(self.order_numbers)}
        self.orders.append(order)
        if self.stream is not None:
            self.stream.send(order)

    def acknowledged(self, seq: int) -> None:
        """Drop the orders with numbers up to `seq`, which the agent has carried out."""
        while self.orders and self.orders[0]["seq"] <= seq:
            self.orders.popleft()

    def end_launcher(self) -> None:
        """Order the agent to end the launcher, if there is one, and all processes below it."""
        if self.launched is not None:
            self.ending_ticks = self.ending_ticks or 0
            self.order({"kind": "kill"})

    @property
    def is_stuck(self) -> bool:
        """Return True if the launcher has not ended in time after the order."""
        return self.launched is not None and (self.ending_ticks or 0) > ENDING_TICKS

    @property
    def has_ended(self) -> bool:
        """Return True if there is no launcher to wait for."""
        return self.launched is None or self.is_stuck

    def stepped(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Record the step in a rank's message, if the message has one."""
        step = whole_number(message.get("step")) if message.get("kind") == "step" else None
        if step is not None:
            self.reached = max(self.reached, (peer.attempt, step))

    def tick(self, reached: tuple[int, int]) -> None:
        """Count a tick.

        Args:
            reached: the attempt, and the highest step in it, of the nodes from which messages
                arrive.
        """
        if self.ending_ticks is not None:
            self.ending_ticks += 1
        if self.stream is None:
            self.away_ticks += 1
            return
        self.silent_ticks += 1
        if self.silent_ticks >= PROBE_TICKS and self.silent_ticks % PROBE_TICKS == 0:
            self.stream.send({"kind": "pong"})
        is_deaf = self.silent_ticks > PROBE_TICKS and not self.stream.is_acknowledged
        self.deaf_ticks = self.deaf_ticks + 1 if is_deaf else 0
        attempt, step = self.others_reached
        if self.silent_ticks <= HEARD_TICKS:
            self.others_reached = reached
        elif self.launched is not None and reached >= (attempt, step + MORE_STEPS):
            self.others_reached, self.deaf_ticks = reached, 0

    def is_lost(self, *, has_spare: bool, is_cut_off: bool, pace: Pace) -> bool:
        """Return True if the node is lost.

        Args:
            has_spare: True if a spare can take the node's place.
            is_cut_off: True if the supervisor itself may be cut off from the network.
            pace: the number of ticks that a step of the job takes.
        """
        # A silent node may have been cut off. After a cut, the agent needs time to connect again.
        was_silent = self.silent_ticks > HEARD_TICKS
        limit = AWAY_TICKS_WITH_SPARE if has_spare and not was_silent else AWAY_TICKS
        # One step is in progress; after it, `MORE_STEPS` steps prove that the node is alive.
        most_deaf_ticks = max(DEAF_TICKS, (1 + MORE_STEPS) * pace.step_ticks)
        is_deaf = self.deaf_ticks > most_deaf_ticks and not is_cut_off
        return self.away_ticks > limit or is_deaf or self.silent_ticks > SILENT_TICKS


def reached_by(nodes: Iterable[Node]) -> tuple[int, int]:
    """Return the attempt, and the highest step in it, of the nodes from which messages arrive."""
    reached = [
        node.reached
        for node in nodes
        if node.stream is not None and node.silent_ticks <= HEARD_TICKS
    ]
    return max(reached, default=(0, 0))
