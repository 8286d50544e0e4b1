"""Nodes, the places for engines on each of them, and the orders to nodes' agents that start and end engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.types.engine import engines_on
from holdfast.evaluate.wire.messages import NodeReport, StartEngine, StopEngine
from holdfast.evaluate.wire.server import Connection

SPARE = "spare/0"
"""The name of the engine that answers nothing and loads each model afresh, to certify swaps."""


@dataclass
class Node:
    """A node, as long as its agent is connected."""

    number: int
    name: str
    peer: Connection
    joined_s: float
    report: NodeReport | None = None
    told: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    """Model to the owners and the rate that this node was last told."""
    crowded: dict[int, list[int]] = field(default_factory=dict)
    """Model that did not fit into this node's memory, to the models that lay there."""


@dataclass
class EngineSlot:
    """A place for an engine, kept while its processes come and go.

    `number` is the policy's, new for each time that an engine is ready; None while none is. `asked` maps the keys in
    its hands to requests.
    """

    name: str
    place: int
    node: int
    ordered_s: float
    """When it was told to start, or to take a model."""
    orders: int = 0
    """How often it was told to start since it last dialled."""
    is_spare: bool = False
    """It takes no requests: it loads each model afresh, to say what swaps are held against."""
    has_loaded: bool = False
    """Whether its process has loaded a model, and with it all that the next one will not have to wait for."""
    peer: Connection | None = None
    number: int | None = None
    swapping: int | None = None
    """The number it had before it began to swap, and has again after it."""
    serving: int | None = None
    loading: int | None = None
    meant_for: int | None = None
    """The model that it was started anew for."""
    heard_s: float = 0.0
    failures: int = 0
    asked: dict[bytes, int] = field(default_factory=dict)
    ready_s: float = 0.0
    pid: int = 0
    cut_s: float | None = None
    """When its line was cut."""
    has_said_all: bool = False
    """Whether it has said, after a restart of ours, what it holds."""

    @property
    def index(self) -> int:
        """Its number on its node."""
        return int(self.name.rsplit("/", 1)[1])


class Orders:
    """See the module. `nodes` are those whose agents are connected; `slots`, by name, are made here."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        nodes: Mapping[str, Node],
        slots: dict[str, EngineSlot],
    ) -> None:
        self._config, self._clock, self._nodes, self._slots = config, clock, nodes, slots
        self._places: dict[str, int] = {}

    def engines_of(self, report: NodeReport) -> int:
        """How many engines a node is to have."""
        if self._config.rescore:
            return 0
        return engines_on(report.gpus, self._config.spec, self._config.engines_per_node)

    def ensure(self, name: str, node: Node) -> None:
        """Have an engine on a node: it is started, unless it runs there."""
        slot = self._slots.get(name) or self.new_slot(name, node.number)
        slot.node = node.number
        if (
            slot.peer is None
        ):  # what its last engine held is asked again when the next one is there, or soon
            slot.ordered_s, slot.failures = self._clock.monotonic_s(), 0
        self._start(slot, node)

    def new_slot(self, name: str, node: int) -> EngineSlot:
        """A place for an engine, of which nothing is known yet."""
        now_s = self._clock.monotonic_s()
        place = self._places.setdefault(name, len(self._places))
        slot = EngineSlot(
            name=name,
            place=place,
            node=node,
            ordered_s=now_s,
            heard_s=now_s,
            is_spare=name == SPARE,
        )
        self._slots[name] = slot
        return slot

    def start_again(self, slot: EngineSlot) -> None:
        """Have an engine started; where only a word was lost with a line, its agent has it and does nothing."""
        slot.ordered_s = self._clock.monotonic_s()
        if node := self._node_of(slot):
            self._start(slot, node)

    def end(self, slot: EngineSlot) -> None:
        """Have an engine's process ended, whatever it does."""
        if slot.peer is not None:
            slot.peer.close()
            slot.peer = None
        if node := self._node_of(slot):
            node.peer.send(StopEngine(name=slot.name))

    def _start(self, slot: EngineSlot, node: Node) -> None:
        spec = self._config.spec
        if not spec.threads and node.report:
            threads = max(1, node.report.cores // max(1, self.engines_of(node.report)))
            spec = msgspec.structs.replace(spec, threads=threads)
        node.peer.send(StartEngine(name=slot.name, spec=spec, index=slot.index))

    def _node_of(self, slot: EngineSlot) -> Node | None:
        return next((one for one in self._nodes.values() if one.number == slot.node), None)
