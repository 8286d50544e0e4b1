"""What nodes' agents are told about engines' processes: start one, start it again, end it."""

from collections.abc import Mapping

import msgspec

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.certifying import SPARE
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.engine_slots import EngineSlot, Node
from holdfast.evaluate.types.engine import engines_on
from holdfast.evaluate.wire.messages import NodeReport, StartEngine, StopEngine


class Orders:
    """See the module. `nodes` are those whose agents are connected; `seats`, by name, are made here."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        nodes: Mapping[str, Node],
        seats: dict[str, EngineSlot],
    ) -> None:
        self._config, self._clock, self._nodes, self._seats = config, clock, nodes, seats
        self._places: dict[str, int] = {}

    def engines_of(self, report: NodeReport) -> int:
        """How many engines a node is to have."""
        if self._config.rescore:
            return 0
        return engines_on(report.gpus, self._config.spec, self._config.engines_per_node)

    def seat(self, name: str, node: Node) -> None:
        """Have an engine on a node: it is started, unless it runs there."""
        seat = self._seats.get(name) or self.new_seat(name, node.number)
        seat.node = node.number
        if (
            seat.peer is None
        ):  # what its last engine held is asked again when the next one is there, or soon
            seat.ordered_s, seat.failures = self._clock.monotonic_s(), 0
        self._start(seat, node)

    def new_seat(self, name: str, node: int) -> EngineSlot:
        """A place for an engine, of which nothing is known yet."""
        now_s = self._clock.monotonic_s()
        place = self._places.setdefault(name, len(self._places))
        seat = EngineSlot(
            name=name,
            place=place,
            node=node,
            ordered_s=now_s,
            heard_s=now_s,
            is_spare=name == SPARE,
        )
        self._seats[name] = seat
        return seat

    def start_again(self, seat: EngineSlot) -> None:
        """Have an engine started; where only a word was lost with a line, its agent has it and does nothing."""
        seat.ordered_s = self._clock.monotonic_s()
        if node := self._node_of(seat):
            self._start(seat, node)

    def end(self, seat: EngineSlot) -> None:
        """Have an engine's process ended, whatever it does."""
        if seat.peer is not None:
            seat.peer.close()
            seat.peer = None
        if node := self._node_of(seat):
            node.peer.send(StopEngine(name=seat.name))

    def _start(self, seat: EngineSlot, node: Node) -> None:
        spec = self._config.spec
        if not spec.threads and node.report:
            threads = max(1, node.report.cores // max(1, self.engines_of(node.report)))
            spec = msgspec.structs.replace(spec, threads=threads)
        node.peer.send(StartEngine(name=seat.name, spec=spec, index=seat.index))

    def _node_of(self, seat: EngineSlot) -> Node | None:
        return next((one for one in self._nodes.values() if one.number == seat.node), None)
