"""Nodes and engines: who is there at all, and which engine serves which model.

An engine loads its first model and then swaps; each swap is certified by the canaries of a fresh load, or undone by
starting the engine anew.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.certifying import Certifying, unfit
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles
from holdfast.evaluate.coordinator.dealing import Dealing
from holdfast.evaluate.coordinator.engine_slots import SPARE, EngineSlot, Node, Orders
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy import events
from holdfast.evaluate.types.engine import uses_gpus
from holdfast.evaluate.wire.messages import (
    ChildExited,
    FetchFailed,
    ModelFetched,
    NodeReport,
    Refused,
    ReleaseModel,
    Serve,
    ServeFailed,
    Serving,
    Stop,
    StopEngine,
    Welcome,
)
from holdfast.evaluate.wire.server import Connection

_ORDER_AGAIN_S = 30.0  # for an engine that has not dialled
_ORDERS_OF_ONE = 10  # until it is ended first: it dials before it loads anything large
_CUT_GRACE_S = (
    1.0  # for an engine whose line was cut to dial again; whether it died its agent says sooner
)
_MOST_FAILURES = 5  # of an engine in a row, before it served once; then its place stays empty
_MOST_FAILED_LOADS = 3  # of a model that no engine ever served; then it is the model

_log = logging.getLogger(__name__)


class EnginePool:
    """See the module.

    `emit` tells the policy; `known` is called when a model's digest and numerics are; `lost` when an engine is gone for
    good; `failed` when a model (None: any model) cannot be evaluated.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        models: Models,
        *,
        emit: Callable[[events.Event], None],
        known: Callable[[Model], None],
        lost: Callable[[EngineSlot], None],
        failed: Callable[..., None],
        chronicle: TimelineWriter,
    ) -> None:
        self._config, self._clock, self._models = config, clock, models
        self._emit, self._known, self._lost, self._failed = emit, known, lost, failed
        self._chronicle = chronicle
        self.nodes: dict[str, Node] = {}
        self.seats: dict[str, EngineSlot] = {}
        self._seat_of: dict[int, EngineSlot] = {}
        self._next_engine = 0
        self._orders = Orders(config, clock, self.nodes, self.seats)
        self._dealing = Dealing(config, models, self.nodes)
        self._certifying = Certifying(config, self.nodes, self.seats, self._dealing.wanted)

    # Nodes

    def node_joined(self, peer: Connection) -> None:
        """An agent said hello; it will report."""
        node = Node(
            number=peer.hello.node,
            name=peer.hello.name,
            peer=peer,
            joined_s=self._clock.monotonic_s(),
        )
        self.nodes[node.name] = node
        peer.send(Welcome())

    def node_reported(self, peer: Connection, report: NodeReport) -> None:
        """What a node has: its seats are made, and weights are dealt when all are there."""
        node = self.nodes[peer.hello.name]
        node.report = report
        spec, now_s = self._config.spec, self._clock.monotonic_s()
        if uses_gpus(spec) and not self._config.rescore and 0 < report.gpus < spec.tensor_parallel:
            why = f"{report.host} has {report.gpus} GPUs, and an engine is to span {spec.tensor_parallel}"
            self._failed(
                None, f"{why}. Give --tp {report.gpus} or less, or nodes with more.", wrong_use=True
            )
            return
        slots = self._config.metric_slots or report.cores
        self._emit(events.NodeJoined(now_s=now_s, node=node.number, metric_slots=slots))
        for index in range(self._orders.engines_of(report)):
            self._orders.seat(f"{node.name}/{index}", node)
        spare = self.seats.get(SPARE)
        if spare is None and self._config.is_stream and self._certifying.is_beside():
            self._orders.seat(SPARE, node)
        elif spare is not None and spare.node != node.number:
            node.peer.send(StopEngine(name=SPARE))  # it was here before this node was away
        elif spare is not None and spare.peer is None:
            self._orders.seat(
                SPARE, node
            )  # the word of its death, or the order to start it, was lost with the line
        self.tick()

    def node_gone(self, peer: Connection) -> None:
        """A node's agent is gone; its engines follow by themselves."""
        node = self.nodes.pop(peer.hello.name)
        host = node.report.host if node.report else node.name
        self._chronicle.node("here", node=node.number, since_s=node.joined_s, host=host)
        now_s = self._clock.monotonic_s()
        self._emit(events.NodeLeft(now_s=now_s, node=node.number))
        self._dealing.node_left(node, now_s)
        self._dealing.deal()

    def child_exited(self, peer: Connection, exited: ChildExited) -> None:
        """An engine's process ended: again, unless it never works."""
        node, seat = self.nodes.get(peer.hello.name), self.seats.get(exited.name)
        if node is None or seat is None or exited.role != "engine" or seat.node != node.number:
            return
        last = exited.tail.strip().splitlines()[-1:] or ["it printed nothing"]
        self._unseat(seat)
        if self._may_try_again(seat, f"it ended with {exited.exit_code}: {last[0]}"):
            self._orders.start_again(seat)

    def _may_try_again(self, seat: EngineSlot, why: str) -> bool:
        """An engine failed. Whether a new process may do better; in the end its place stays empty."""
        if seat.is_spare:
            self._spare_failed(why)
        seat.failures += 1
        if seat.failures < _MOST_FAILURES:
            return True
        _log.error("Engine %s failed %d times and is given up: %s", seat.name, seat.failures, why)
        self._unseat(seat)
        self._orders.end(seat)
        del self.seats[seat.name]
        if seat.is_spare:
            self._certifying.give_up()
        if all(one.is_spare for one in self.seats.values()):
            self._failed(
                None,
                f"No engine can be started: {why}. The logs are in {self._config.folder}/logs.",
            )
        return False

    # Weights

    def fetched(self, peer: Connection, fetched: ModelFetched) -> None:
        """A model lies in a node's memory."""
        node, model = self.nodes[peer.hello.name], self._models.get(fetched.model)
        if model is None or model.outcome is not None:
            peer.send(ReleaseModel(model=fetched.model))
            return
        if not model.digest:
            self._models.know(model, fetched.digest)
        elif model.digest != fetched.digest:
            when, cure = (
                "since this evaluation began",
                "Put the old ones back, or evaluate these under another --id",
            )
            if model.folders:
                when, cure = "while they were read", "Evaluate a checkpoint that nobody writes"
            self._failed(
                model,
                f"The weights of {model.added.name} changed {when}: node {node.name} has other bytes than were there "
                f"first. {cure}.",
            )
            return
        self._dealing.fetched(node, model, fetched.folder)
        now_s = self._clock.monotonic_s()
        self._chronicle.node(
            "fetch", node=node.number, since_s=now_s - fetched.seconds, fetched=fetched
        )
        self._emit(events.ModelReady(now_s=now_s, node=node.number, model=model.number))
        self.identify(model)
        self.serve_idle()

    def fetch_failed(self, peer: Connection, failure: FetchFailed) -> None:
        """A node cannot have a model, or not now. If no other could either, its evaluation ends."""
        model, node = self._models.get(failure.model), self.nodes[peer.hello.name]
        if model is None or model.outcome is not None:
            return
        _log.warning("Node %s cannot have %s: %s", node.name, model.added.name, failure.why)
        if why := self._dealing.failed(node, model, failure):
            self._failed(model, why)
        else:
            self._dealing.deal()

    def release(self, model: Model) -> None:
        """A model ended: its memory is freed on each node when no engine serves it there."""
        self._dealing.release(model)
        self._dealing.deal()
        self.serve_idle()

    # Engines

    def engine_joined(self, peer: Connection) -> None:
        """An engine's worker said hello, for the first time or again."""
        seat = self.seats.get(peer.hello.name)
        if seat is None:  # of a node that is still to report after our own restart, or given up
            seat = self._orders.new_seat(peer.hello.name, peer.hello.node)
        if seat.is_spare and seat.node != peer.hello.node:
            peer.send(Refused(why="Its place was given to another node."))
            return
        same_process = seat.pid == peer.hello.pid
        peer.send(Welcome())
        seat.peer, seat.node, seat.pid = peer, peer.hello.node, peer.hello.pid
        seat.heard_s, seat.cut_s, seat.orders = self._clock.monotonic_s(), None, 0
        if seat.number is not None and same_process:
            return  # it goes on where it was
        self._unseat(seat)
        if peer.hello.model >= 0:
            seat.loading = peer.hello.model  # it says next that it serves that
        else:
            self.serve_idle()

    def engine_gone(self, peer: Connection) -> None:
        """An engine's connection ended: unless it is back soon, what it held is to be asked again."""
        seat = self.seats.get(peer.hello.name)
        if seat is None or seat.peer is not peer:
            return
        seat.peer, seat.cut_s = None, self._clock.monotonic_s()
        seat.loading = None

    def _unseat(self, seat: EngineSlot) -> None:
        known_as = seat.number if seat.number is not None else seat.swapping
        if known_as is not None:
            self._emit(events.EngineLeft(now_s=self._clock.monotonic_s(), engine=known_as))
            del self._seat_of[known_as]
        if seat.number is not None:
            self._chronicle_served(seat)
            self._chronicle.engine(
                "lost",
                engine=seat.place,
                node=seat.node,
                model=seat.serving or 0,
                since_s=seat.heard_s,
            )
        seat.number = seat.swapping = seat.serving = seat.loading = seat.cut_s = None
        seat.has_loaded = False
        seat.asked.clear()
        self._lost(seat)

    def _chronicle_served(self, seat: EngineSlot) -> None:
        self._chronicle.engine(
            "serve",
            engine=seat.place,
            node=seat.node,
            model=seat.serving or 0,
            since_s=seat.ready_s,
        )

    def chronicle_end(self) -> None:
        """It is over: write what nodes and engines were until now."""
        for seat in self.seats.values():
            if seat.number is not None:
                self._chronicle_served(seat)
        for node in self.nodes.values():
            host = node.report.host if node.report else node.name
            self._chronicle.node("here", node=node.number, since_s=node.joined_s, host=host)

    def serve_idle(self) -> None:
        """Give a model to every engine that has none: what it was started anew for, else the oldest on its node."""
        for seat in list(self.seats.values()):
            if seat.peer is None or seat.serving is not None or seat.loading is not None:
                continue
            models = self._certifying.for_spare(seat) if seat.is_spare else self._dealing.wanted()
            meant = [model for model in models if model.number == seat.meant_for]
            for model in meant + models:
                if self._serve(seat, model):
                    break
        if home := self._certifying.new_home(self._clock.monotonic_s()):
            self._seat_spare(home)

    def _serve(self, seat: EngineSlot, model: Model) -> bool:
        if model.outcome is not None:
            return False
        folder = model.folders.get(seat.node)
        if model.added.manifest is not None and folder is None:
            return False
        assert seat.peer is not None
        if not model.digest:
            model.digest = (
                f"unknown, of evaluation {self._config.evaluation_id} model {model.number}"
            )
        if seat.serving is not None:  # a swap begins now; a load when the process was ordered
            seat.ordered_s = self._clock.monotonic_s()
        seat.loading = model.number
        seat.peer.send(
            Serve(model=model.number, folder=folder or "", digest=model.digest, fresh=seat.is_spare)
        )
        return True

    def swap(self, engine: int, number: int) -> None:
        """The policy wants an idle engine to serve another model."""
        seat, model = self._seat_of.get(engine), self._models.get(number)
        if seat is None or model is None:
            return
        if seat.peer is None:  # its line is cut, and would be back to go on where it was
            self._unseat(seat)
            return
        self._chronicle_served(seat)
        seat.number, seat.swapping = None, engine
        if (
            not self._certifying.is_beside()
            and model.canary is None
            and model.added.manifest is not None
        ):
            self._restart(seat, meant_for=number)  # its fresh load is the others' reference
            return
        if not self._serve(seat, model):
            seat.serving = None

    def serving(self, peer: Connection, said: Serving) -> None:
        """An engine has a model; it may answer when its canaries are right."""
        seat, model = self.seats.get(peer.hello.name), self._models.get(said.model)
        if seat is None or model is None:
            peer.send(Stop())
            return
        seat.loading, seat.meant_for, seat.has_loaded = None, None, True
        if said.kept and seat.number is not None and seat.serving == said.model:
            return  # only its line had been cut
        if model.outcome is not None:
            seat.serving = None
            self.serve_idle()
            return
        if why := unfit(model, said, is_exact=self._config.spec.mode == "exact"):
            _log.warning("Engine %s is started anew: %s", seat.name, why)
            if self._may_try_again(seat, why):
                self._restart(seat, meant_for=model.number)
            return
        self._note(seat, model, said)
        if seat.is_spare:  # at once ready for the next
            for other in self._certifying.waiting(model):  # they say their canaries again
                other.serving = None
                self._serve(other, model)
            self.serve_idle()
            return
        if (
            seat.number is not None
        ):  # it served another, and its line was cut since: what it held is asked again
            self._unseat(seat)
        seat.serving, model.is_begun = model.number, True
        self.serve_idle()  # a model that came before any engine served has no reference yet
        if said.how == "swap" and model.canary is None:
            if not self._certifying.is_beside():  # nobody will speak for it but itself, afresh
                self._restart(seat, meant_for=model.number)
            return  # until the fresh load beside it has spoken
        self._seat_ready(seat, said)

    def _note(self, seat: EngineSlot, model: Model, said: Serving) -> None:
        """Keep what an engine says of itself and of a model."""
        seat.failures = 0
        if said.how == "load" and model.canary is None:
            self._models.certify(model, said.canary)
        if not said.kept and not seat.is_spare:
            self._chronicle.engine(
                said.how,
                engine=seat.place,
                node=seat.node,
                model=model.number,
                since_s=seat.ordered_s,
            )
        model.numerics = model.numerics or said.numerics
        model.max_length = model.max_length or said.max_length
        for (
            one
        ) in self._models.open():  # those that were fetched before lacked nothing but the numerics
            self.identify(one)

    def _seat_ready(self, seat: EngineSlot, said: Serving) -> None:
        if seat.swapping is None:
            seat.swapping = self._next_engine
            self._next_engine += 1
        seat.number, seat.swapping = seat.swapping, None
        self._seat_of[seat.number] = seat
        seat.ready_s = self._clock.monotonic_s()
        curve = CoordinatorFiles(Path(self._config.folder)).curve
        if not curve.exists():
            write_atomic(curve, msgspec.json.encode(said.curve))
        self._emit(
            events.EngineReady(
                now_s=self._clock.monotonic_s(),
                engine=seat.number,
                node=seat.node,
                model=said.model,
                curve=said.curve,
            )
        )

    def serve_failed(self, peer: Connection, failure: ServeFailed) -> None:
        """An engine cannot have a model: a new process may, or nobody can."""
        seat, model = self.seats.get(peer.hello.name), self._models.get(failure.model)
        if seat is None or model is None:
            return
        if model.outcome is not None:  # it ended meanwhile, and with it its weights
            seat.loading = seat.serving = seat.meant_for = None
            if failure.restart:
                self._restart(seat)
            self.serve_idle()
            return
        _log.warning("Engine %s cannot serve %s: %s", seat.name, model.added.name, failure.why)
        if not failure.restart:
            seat.loading = seat.serving = seat.meant_for = None  # it may have the next
            self._failed(None if failure.any_model else model, failure.why, wrong_use=True)
            return
        if not (
            seat.has_loaded or model.is_begun
        ):  # not a swap: a new process met it, and nothing else
            model.failed_loads += 1
            if model.failed_loads == _MOST_FAILED_LOADS:
                self._failed(
                    model,
                    f"No engine can load {model.added.name} ({failure.why.rstrip('.')}). See that its files are whole; "
                    f"the logs are in {self._config.folder}/logs.",
                )
        if self._may_try_again(seat, failure.why):
            self._restart(seat, meant_for=model.number)

    def _restart(self, seat: EngineSlot, *, meant_for: int | None = None) -> None:
        self._unseat(seat)
        seat.meant_for = meant_for
        self._orders.end(seat)
        self._orders.start_again(seat)

    def identify(self, model: Model) -> None:
        """Tell when it is known under what a model's answers are kept."""
        if not model.numerics:  # engines of one kind agree, whatever they serve
            model.numerics = next((other.numerics for other in self._models if other.numerics), "")
        if model.digest and model.numerics and model.answers is None and model.outcome is None:
            self._known(model)

    # The spare engine

    def _seat_spare(self, node: Node) -> None:
        """Start the engine that loads afresh what others swap to on a node; it was nowhere, or cannot go on there."""
        if spare := self.seats.get(SPARE):
            self._unseat(spare)
            self._orders.end(spare)
        self._orders.seat(SPARE, node)

    def _spare_failed(self, why: str) -> None:
        _log.warning("The engine that certifies swaps failed: %s", why)
        for seat in self._certifying.waiting():  # they load afresh themselves
            self._restart(seat, meant_for=seat.serving)

    # Time

    def heard(self, peer: Connection) -> None:
        """A sign of life."""
        if seat := self.seats.get(peer.hello.name):
            seat.heard_s = self._clock.monotonic_s()

    def is_complete(self) -> bool:
        """Whether every node that is expected is there, with engines that all serve and have said what they hold."""
        reported = sum(node.report is not None for node in self.nodes.values())
        return reported >= self._config.nodes and all(
            seat.number is not None and seat.has_said_all
            for seat in self.seats.values()
            if not seat.is_spare
        )

    def seat_of(self, engine: int) -> EngineSlot | None:
        """The seat of an engine as the policy numbers it."""
        return self._seat_of.get(engine)

    def tick(self) -> None:
        """Deal weights when all nodes are there or waited for long enough; start hung engines anew."""
        now_s = self._clock.monotonic_s()
        self._dealing.gather(now_s)
        self._dealing.deal()
        self.serve_idle()
        for seat in list(self.seats.values()):
            if seat.peer is None and now_s - max(seat.ordered_s, seat.heard_s) > _ORDER_AGAIN_S:
                seat.orders += 1
                if (
                    seat.orders % _ORDERS_OF_ONE == 0
                ):  # its process is there, and hangs before it dials
                    self._orders.end(seat)
                self._orders.start_again(seat)
            if seat.cut_s is not None and now_s - seat.cut_s > _CUT_GRACE_S:
                self._unseat(seat)
            if seat.peer is not None and now_s - seat.heard_s > self._config.silent_s:
                _log.warning(
                    "Engine %s was silent for %.0f s and is started anew.",
                    seat.name,
                    now_s - seat.heard_s,
                )
                self._restart(seat)
                seat.heard_s = now_s
