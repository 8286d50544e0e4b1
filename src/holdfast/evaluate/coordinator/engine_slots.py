"""Keep track of nodes and engine slots, and order agents to start and end engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.types.engine import EngineSpec, engines_on
from holdfast.evaluate.wire.messages import NodeReport, StartEngine, StopEngine
from holdfast.evaluate.wire.server import Connection

SPARE = "spare/0"
"""The name of the engine that certifies swaps: it takes no requests and loads each model afresh."""


@dataclass
class Node:
    """A node with a connected agent."""

    number: int
    name: str
    peer: Connection
    joined_s: float
    report: NodeReport | None = None
    sent_fetches: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    """Model number to the owners and the read limit in the last `FetchModel` sent to this node."""
    has_engines: bool = False
    """True once the engines of this node have been ordered to start."""
    crowded: dict[int, list[int]] = field(default_factory=dict)
    """Models that did not fit into this node's memory.

    The keys are their numbers; the values are the numbers of the models that were in memory.
    """


@dataclass
class EngineSlot:
    """A place for one engine on a node, which remains when a process of the engine ends.

    `number` is the policy's number of the engine: a new number each time an engine becomes ready in
    the slot, and None while no engine is ready. `sent` maps the key of each request at the engine
    to the request's number.
    """

    name: str
    place: int
    node: int
    ordered_s: float
    """The time when the engine was last ordered to start or to load a model."""
    orders: int = 0
    """The number of orders to start since the engine was last connected."""
    is_spare: bool = False
    """True for the spare engine, which certifies swaps by fresh loads and takes no requests."""
    has_loaded: bool = False
    """True if the process has loaded a model, so that its next load skips slow initialisation."""
    peer: Connection | None = None
    number: int | None = None
    swapping: int | None = None
    """The engine's number from before a swap; the engine gets this number again afterwards."""
    serving: int | None = None
    loading: int | None = None
    meant_for: int | None = None
    """The model for which the engine was restarted."""
    heard_s: float = 0.0
    failures: int = 0
    sent: dict[bytes, int] = field(default_factory=dict)
    ready_s: float = 0.0
    pid: int = 0
    cut_s: float | None = None
    """The time when the connection was cut."""
    has_sent_all: bool = False
    """True if the engine has reported its requests since the coordinator's restart."""

    @property
    def index(self) -> int:
        """The number of the engine on its node."""
        return int(self.name.rsplit("/", 1)[1])


class Orders:
    """Order agents to start and end engines.

    `slots` maps the names of engines to their slots, and is filled here. `nodes` maps names to the
    connected nodes.
    """

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
        """Return the number of engines that a node should run."""
        if self._config.rescore:
            return 0
        return engines_on(report.gpus, self._config.spec, self._config.engines_per_node)

    def ensure(self, name: str, node: Node) -> None:
        """Start an engine on a node, unless the engine runs there already."""
        slot = self._slots.get(name) or self.new_slot(name, node.number)
        slot.node = node.number
        # The former engine's requests are sent again when the next engine connects, or soon.
        if slot.peer is None:
            slot.ordered_s, slot.failures = self._clock.monotonic_s(), 0
        self._start(slot, node)

    def new_slot(self, name: str, node: int) -> EngineSlot:
        """Create the slot of an engine that has none."""
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
        """Order the node to start an engine; the node ignores the order if the engine runs."""
        slot.ordered_s = self._clock.monotonic_s()
        if node := self._node_of(slot):
            self._start(slot, node)

    def end(self, slot: EngineSlot) -> None:
        """Order the node to end an engine's process, also if the process hangs or loads a model."""
        if slot.peer is not None:
            slot.peer.close()
            slot.peer = None
        if node := self._node_of(slot):
            node.peer.send(StopEngine(name=slot.name))

    def spec_for(self, node: Node) -> EngineSpec:
        """Return the engine spec for a node, with the number of CPU threads for each engine."""
        spec = self._config.spec
        if not spec.threads and node.report:
            threads = max(1, node.report.cores // max(1, self.engines_of(node.report)))
            spec = msgspec.structs.replace(spec, threads=threads)
        return spec

    def _start(self, slot: EngineSlot, node: Node) -> None:
        node.peer.send(StartEngine(name=slot.name, spec=self.spec_for(node), index=slot.index))

    def _node_of(self, slot: EngineSlot) -> Node | None:
        return next((one for one in self._nodes.values() if one.number == slot.node), None)
