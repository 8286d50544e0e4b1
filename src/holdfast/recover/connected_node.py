"""The supervisor's record of one node, with the orders not acknowledged by the node's agent.

A node is lost in one of four cases. The supervisor measures all times below in its own ticks.

- The connection has ended. The node's process holds the connection, so that a killed agent does not
  end the connection.
- The host has acknowledged no byte for some time, as without power. The kernel acknowledges, so
  that a frozen agent does not count. Ranks that wait for each other prove that the node lives: if
  the ranks of other nodes make steps, the cable of the supervisor alone is cut. The limit grows
  with the length of the job's steps, so that the other ranks can complete steps meanwhile.
- The agent is silent for longer than a frozen agent lives.
- The launcher does not end by SIGKILL, as in a process that the kernel holds. Such a node is stuck,
  and serves again once the launcher has ended.
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
"""Ticks after which a node whose agent's connection has ended is lost."""
AWAY_TICKS_WITH_SPARE = 5
"""The same if a spare can take the node's place. The connection ends with the node, not with a
killed agent: see `agent.held_connection`."""
HEARD_TICKS = 20
"""Ticks without a message after which a node counts as silent. Agents send each second."""
PROBE_TICKS = 10
"""Ticks between two messages to a silent node, which the node's kernel is to acknowledge."""
DEAF_TICKS = 90
"""Ticks in a row without an acknowledgement after which a node is lost, counted from the first
probe: ten seconds in all."""
SILENT_TICKS = 450
"""Ticks after which a node is lost whose agent is silent, though the kernel acknowledges. A frozen
agent is killed and replaced before."""
ENDING_TICKS = 600
"""Ticks from the order to end a launcher until the node counts as stuck."""
LEFT = {
    "kind": "end",
    "state": "stopped",
    "exit_code": 4,
    "outcome": "Stopped by SIGTERM, on this node alone.",
}
"""The last message to a node whose scheduler ends the node alone."""
MORE_STEPS = 2
"""Steps of other nodes' ranks that prove the life of a node. Ranks may complete one step without a
dead rank."""


class Pace:
    """The ticks that a step of the job takes."""

    def __init__(self) -> None:
        self._reached = (0, 0)
        self._ticks = 0
        """The ticks since the last step."""
        self.step_ticks = 0.0
        """The ticks of the last step; 0 before a second step."""

    def tick(self, reached: tuple[int, int]) -> None:
        """Count a tick; `reached` is the attempt and the highest step of the job."""
        self._ticks += 1
        if reached > self._reached:
            (attempt, step), (before, step_before) = reached, self._reached
            if attempt == before:
                self.step_ticks = self._ticks / (step - step_before)
            self._reached, self._ticks = reached, 0


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
    """The ticks since the last message of the agent."""
    deaf_ticks: int = 0
    """The ticks in a row in which the node's host has acknowledged nothing."""
    ending_ticks: int | None = None
    """The ticks since the order to end the launcher; None without an order."""
    reached: tuple[int, int] = (0, 0)
    """The attempt and the highest step that the node's ranks have reported."""
    others_reached: tuple[int, int] = (0, 0)
    """The same of all nodes, when this node last proved its life."""
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

    def end_launcher(self) -> None:
        """Order the end of the launcher, if there is one, with all processes below it."""
        if self.launched is not None:
            self.ending_ticks = self.ending_ticks or 0
            self.order({"kind": "kill"})

    @property
    def is_stuck(self) -> bool:
        """Return True if the launcher has not ended in time after the order to end."""
        return self.launched is not None and (self.ending_ticks or 0) > ENDING_TICKS

    @property
    def has_ended(self) -> bool:
        """Return True if no launcher is to be waited for."""
        return self.launched is None or self.is_stuck

    def stepped(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Record the step of a rank's message, if the message has one."""
        step = whole_number(message.get("step")) if message.get("kind") == "step" else None
        if step is not None:
            self.reached = max(self.reached, (peer.attempt, step))

    def tick(self, reached: tuple[int, int]) -> None:
        """Count a tick.

        Args:
            reached: the attempt and the highest step of the nodes from which messages arrive.
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
            is_cut_off: True if the supervisor itself may be cut off.
            pace: the pace of the job's steps.
        """
        # A connection that was cut may end before the agent connects again.
        was_silent = self.silent_ticks > HEARD_TICKS
        limit = AWAY_TICKS_WITH_SPARE if has_spare and not was_silent else AWAY_TICKS
        # The step that was going on, and the steps that prove the life of the node.
        most_deaf_ticks = max(DEAF_TICKS, (1 + MORE_STEPS) * pace.step_ticks)
        is_deaf = self.deaf_ticks > most_deaf_ticks and not is_cut_off
        return self.away_ticks > limit or is_deaf or self.silent_ticks > SILENT_TICKS


def reached_by(nodes: Iterable[Node]) -> tuple[int, int]:
    """Return the attempt and the highest step of the nodes from which messages arrive."""
    reached = [
        node.reached
        for node in nodes
        if node.stream is not None and node.silent_ticks <= HEARD_TICKS
    ]
    return max(reached, default=(0, 0))
