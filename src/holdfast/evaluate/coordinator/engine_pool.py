"""Keep track of the nodes and engines, and decide when each engine loads or swaps a model.

An engine loads its first model and swaps to later ones. The canaries of a fresh load certify each
swap; if they differ, the engine is restarted.
"""

import logging
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.certifying import Certifying, unfit
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles
from holdfast.evaluate.coordinator.dealing import Dealing
from holdfast.evaluate.coordinator.engine_slots import SPARE, EngineSlot, Node, Orders
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.open_requests import ResumedRequests
from holdfast.evaluate.coordinator.policy_queue import PolicyQueue
from holdfast.evaluate.coordinator.resting import Resting
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

_ORDER_AGAIN_S = 30.0  # when to order the start of an unconnected engine again
_ORDERS_OF_ONE = 10  # then the process is ended; it should connect before it loads anything large
_CUT_GRACE_S = 1.0  # time to reconnect after a cut; a death is reported sooner by the agent
_MAX_FAILURES = 5  # failures in a row of an engine that never served; then its slot is removed
_MAX_FAILED_LOADS = 3  # of a model that no engine has served; then the model is at fault

_log = logging.getLogger(__name__)


class ModelListener(Protocol):
    """Handle the facts about models that the engine pool learns from nodes and engines."""

    def model_known(self, model: Model) -> None:
        """Handle a model whose digest and numerics are known now.

        Digest and numerics name the journal of the model's answers, which can now be opened.
        """
        ...

    def model_failed(self, model: Model | None, why: str, *, wrong_use: bool = False) -> None:
        """Handle a model that cannot be evaluated; None means all models."""
        ...


class EnginePool:
    """Keep nodes and engines, and send the messages that start, load and swap engines.

    Args:
        config: the evaluation's configuration.
        clock: the clock for events and for the silence of engines.
        policy: receives an event for each node and engine that joins or leaves.
        models: the models of the evaluation.
        resumed: forgets the requests of engines that are gone for good.
        timeline: records the activities of nodes and engines.
        listener: is called with facts about models.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        policy: PolicyQueue,
        models: Models,
        resumed: ResumedRequests,
        timeline: TimelineWriter,
        listener: ModelListener,
    ) -> None:
        self._config, self._clock, self._policy, self._models = config, clock, policy, models
        self._resumed, self._timeline, self._listener = resumed, timeline, listener
        self.nodes: dict[str, Node] = {}
        self.slots: dict[str, EngineSlot] = {}
        self._slot_of: dict[int, EngineSlot] = {}
        self._next_engine = 0
        self._orders = Orders(config, clock, self.nodes, self.slots)
        self._dealing = Dealing(config, models, self.nodes)
        self._certifying = Certifying(config, self.nodes, self.slots, self._dealing)
        self._resting = Resting(config, clock, models, self._orders)

    # Nodes

    def node_joined(self, peer: Connection) -> None:
        """Add a node that connected; its `NodeReport` follows."""
        node = Node(
            number=peer.hello.node,
            name=peer.hello.name,
            peer=peer,
            joined_s=self._clock.monotonic_s(),
        )
        self.nodes[node.name] = node
        peer.send(Welcome())

    def node_reported(self, peer: Connection, report: NodeReport) -> None:
        """Handle a node's report: create its engine slots and assign weights to it."""
        node = self.nodes[peer.hello.name]
        node.report = report
        spec, now_s = self._config.spec, self._clock.monotonic_s()
        if uses_gpus(spec) and not self._config.rescore and 0 < report.gpus < spec.tensor_parallel:
            why = (
                f"{report.host} has {report.gpus} GPUs, and an engine needs {spec.tensor_parallel}"
            )
            self._listener.model_failed(
                None, f"{why}. Give --tp {report.gpus} or less, or nodes with more.", wrong_use=True
            )
            return
        metric_slots = self._config.metric_slots or report.cores
        self._policy.put(
            events.NodeJoined(now_s=now_s, node=node.number, metric_slots=metric_slots)
        )
        self.tick()

    def _start_engines(self, node: Node) -> None:
        assert node.report is not None
        node.has_engines = True
        for index in range(self._orders.engines_of(node.report)):
            self._orders.ensure(f"{node.name}/{index}", node)
        spare = self.slots.get(SPARE)
        if spare is None and self._config.is_stream and self._certifying.is_beside():
            self._orders.ensure(SPARE, node)
        elif spare is not None and spare.node != node.number:
            node.peer.send(StopEngine(name=SPARE))  # left over from before the node's absence
        elif spare is not None and spare.peer is None:
            # The order, or the report of the process's end, was lost with the connection.
            self._orders.ensure(SPARE, node)

    def node_left(self, peer: Connection) -> None:
        """Remove a node; its engines have connections of their own and are removed separately."""
        node = self.nodes.pop(peer.hello.name)
        host = node.report.host if node.report else node.name
        self._timeline.node("here", node=node.number, since_s=node.joined_s, host=host)
        now_s = self._clock.monotonic_s()
        self._policy.put(events.NodeLeft(now_s=now_s, node=node.number))
        self._dealing.node_left(node, now_s)
        self._dealing.deal()

    def child_exited(self, peer: Connection, exited: ChildExited) -> None:
        """Handle the end of an engine's process: restart it, unless it failed too often."""
        node, slot = self.nodes.get(peer.hello.name), self.slots.get(exited.name)
        if node is None or slot is None or exited.role != "engine" or slot.node != node.number:
            return
        last = exited.tail.strip().splitlines()[-1:] or ["it printed nothing"]
        self._vacate(slot)
        if self._may_try_again(slot, f"it ended with {exited.exit_code}: {last[0]}"):
            self._orders.start_again(slot)

    def _may_try_again(self, slot: EngineSlot, why: str) -> bool:
        """Count an engine's failure; after too many, remove its slot.

        Returns:
            True if a new process may try again.
        """
        if slot.is_spare:
            self._spare_failed(why)
        slot.failures += 1
        if slot.failures < _MAX_FAILURES:
            return True
        _log.error(
            "Engine %s failed %d times and is not restarted: %s", slot.name, slot.failures, why
        )
        self._vacate(slot)
        self._orders.end(slot)
        del self.slots[slot.name]
        if slot.is_spare:
            self._certifying.give_up()
        if all(one.is_spare for one in self.slots.values()):
            self._listener.model_failed(
                None,
                f"No engine can be started: {why}. The logs are in {self._config.folder}/logs.",
            )
        return False

    # Weights

    def fetched(self, peer: Connection, fetched: ModelFetched) -> None:
        """Record that a node holds a model.

        The model fails if the digest of its weights differs from a digest recorded earlier.
        """
        node, model = self.nodes[peer.hello.name], self._models.get(fetched.model)
        if model is None or model.outcome is not None:
            peer.send(ReleaseModel(model=fetched.model))
            return
        self._resting.fetched(model, fetched.digest, self.nodes.values())
        if not model.digest:
            self._models.know(model, fetched.digest)
        elif model.digest != fetched.digest:
            when, cure = (
                "since this evaluation began",
                "Put the old ones back, or evaluate these under another --id",
            )
            if model.folders:
                when, cure = "while they were read", "Evaluate a checkpoint that no process writes"
            self._listener.model_failed(
                model,
                f"The weights of {model.added.name} changed {when}: node {node.name} has other "
                "bytes than were there "
                f"first. {cure}.",
            )
            return
        self._dealing.fetched(node, model, fetched.folder)
        now_s = self._clock.monotonic_s()
        self._timeline.node(
            "fetch", node=node.number, since_s=now_s - fetched.seconds, fetched=fetched
        )
        self._policy.put(events.ModelReady(now_s=now_s, node=node.number, model=model.number))
        self.identify(model)
        self.serve_idle()

    def fetch_failed(self, peer: Connection, failure: FetchFailed) -> None:
        """Record that a node cannot fetch a model now; fail the model if no node can."""
        model, node = self._models.get(failure.model), self.nodes[peer.hello.name]
        if model is None or model.outcome is not None:
            return
        _log.warning("Node %s cannot have %s: %s", node.name, model.added.name, failure.why)
        if why := self._dealing.failed(node, model, failure):
            self._listener.model_failed(model, why)
        else:
            self._dealing.deal()

    def release(self, model: Model) -> None:
        """Free an ended model's memory on every node."""
        self._dealing.release(model)
        self._dealing.deal()
        self.serve_idle()

    # Engines

    def engine_joined(self, peer: Connection) -> None:
        """Connect an engine's worker, for the first time or after a cut."""
        slot = self.slots.get(peer.hello.name)
        if slot is None:  # we restarted and its node has not reported, or the slot was removed
            slot = self._orders.new_slot(peer.hello.name, peer.hello.node)
        if slot.is_spare and slot.node != peer.hello.node:
            peer.send(Refused(why="Its place was given to another node."))
            return
        self.need_engines()  # do not rest: an engine from before our restart is at work
        same_process = slot.pid == peer.hello.pid
        peer.send(Welcome())
        slot.peer, slot.node, slot.pid = peer, peer.hello.node, peer.hello.pid
        slot.heard_s, slot.cut_s, slot.orders = self._clock.monotonic_s(), None, 0
        if slot.number is not None and same_process:
            return  # the process continues as before
        self._vacate(slot)
        if peer.hello.model >= 0:
            slot.loading = peer.hello.model  # its `Serving` message follows
        else:
            self.serve_idle()

    def engine_left(self, peer: Connection) -> None:
        """Start the grace period in which an engine may reconnect and keep its requests."""
        slot = self.slots.get(peer.hello.name)
        if slot is None or slot.peer is not peer:
            return
        slot.peer, slot.cut_s = None, self._clock.monotonic_s()
        slot.loading = None

    def _vacate(self, slot: EngineSlot) -> None:
        known_as = slot.number if slot.number is not None else slot.swapping
        if known_as is not None:
            self._policy.put(events.EngineLeft(now_s=self._clock.monotonic_s(), engine=known_as))
            del self._slot_of[known_as]
        if slot.number is not None:
            self._record_served(slot)
            self._timeline.engine(
                "lost",
                engine=slot.place,
                node=slot.node,
                model=slot.serving or 0,
                since_s=slot.heard_s,
            )
        slot.number = slot.swapping = slot.serving = slot.loading = slot.cut_s = None
        slot.has_loaded = False
        slot.sent.clear()
        self._resumed.engine_lost(slot.name)

    def _record_served(self, slot: EngineSlot) -> None:
        self._timeline.engine(
            "serve",
            engine=slot.place,
            node=slot.node,
            model=slot.serving or 0,
            since_s=slot.ready_s,
        )

    def record_end(self) -> None:
        """Record in the timeline the activities of nodes and engines that last until the end."""
        for slot in self.slots.values():
            if slot.number is not None:
                self._record_served(slot)
        for node in self.nodes.values():
            host = node.report.host if node.report else node.name
            self._timeline.node("here", node=node.number, since_s=node.joined_s, host=host)

    def serve_idle(self) -> None:
        """Assign a model to every connected engine that has none.

        An engine that was restarted for a model gets this model. Any other engine gets the oldest
        open model on its node; the spare engine gets a model to certify.
        """
        for slot in list(self.slots.values()):
            if slot.peer is None or slot.serving is not None or slot.loading is not None:
                continue
            models = self._certifying.for_spare(slot) if slot.is_spare else self._dealing.wanted()
            meant = [model for model in models if model.number == slot.meant_for]
            for model in meant + models:
                if self._serve(slot, model):
                    break
        if home := self._certifying.new_home(self._clock.monotonic_s()):
            self._place_spare(home)

    def _serve(self, slot: EngineSlot, model: Model) -> bool:
        if model.outcome is not None:
            return False
        folder = model.folders.get(slot.node)
        if model.added.manifest is not None and folder is None:
            return False
        assert slot.peer is not None
        if not model.digest:
            model.digest = (
                f"unknown, of evaluation {self._config.evaluation_id} model {model.number}"
            )
        if slot.serving is not None:  # a swap is timed from now, a load from its process's start
            slot.ordered_s = self._clock.monotonic_s()
        slot.loading = model.number
        slot.peer.send(
            Serve(model=model.number, folder=folder or "", digest=model.digest, fresh=slot.is_spare)
        )
        return True

    def swap(self, engine: int, number: int) -> None:
        """Swap an idle engine to another model, as the policy decided."""
        slot, model = self._slot_of.get(engine), self._models.get(number)
        if slot is None or model is None:
            return
        if slot.peer is None:  # after the cut, the engine would continue with its former model
            self._vacate(slot)
            return
        self._record_served(slot)
        slot.number, slot.swapping = None, engine
        if (
            not self._certifying.is_beside()
            and model.canary is None
            and model.added.manifest is not None
        ):
            self._restart(slot, meant_for=number)  # its fresh load becomes the others' reference
            return
        if not self._serve(slot, model):
            slot.serving = None

    def serving(self, peer: Connection, report: Serving) -> None:
        """Handle an engine that has loaded a model; it may answer if its canaries are right."""
        slot, model = self.slots.get(peer.hello.name), self._models.get(report.model)
        if slot is None or model is None:
            peer.send(Stop())
            return
        slot.loading, slot.meant_for, slot.has_loaded = None, None, True
        if report.kept and slot.number is not None and slot.serving == report.model:
            return  # only the connection was cut
        if model.outcome is not None:
            slot.serving = None
            self.serve_idle()
            return
        if why := self._resting.serves(model, self._node_of(slot), report.numerics):
            self._listener.model_failed(model, why)
            return
        if why := unfit(model, report, is_exact=self._config.spec.mode == "exact"):
            _log.warning("Engine %s is restarted: %s", slot.name, why)
            if self._may_try_again(slot, why):
                self._restart(slot, meant_for=model.number)
            return
        self._note(slot, model, report)
        if slot.is_spare:  # ready for the next model at once
            for other in self._certifying.waiting(model):  # these engines repeat their canaries
                other.serving = None
                self._serve(other, model)
            self.serve_idle()
            return
        # The model changed during the cut: the engine's previous requests are sent again.
        if slot.number is not None:
            self._vacate(slot)
        slot.serving, model.is_begun = model.number, True
        self.serve_idle()  # models added before the first engine served lack a reference
        if report.how == "swap" and model.canary is None:
            if not self._certifying.is_beside():  # only its own fresh load can certify it
                self._restart(slot, meant_for=model.number)
            return  # wait until the spare engine certifies the model
        self._slot_ready(slot, report)

    def _note(self, slot: EngineSlot, model: Model, report: Serving) -> None:
        """Record the facts that an engine reported about itself and about a model."""
        slot.failures = 0
        if report.how == "load" and model.canary is None:
            self._models.certify(model, report.canary)
        if not report.kept and not slot.is_spare:
            self._timeline.engine(
                report.how,
                engine=slot.place,
                node=slot.node,
                model=model.number,
                since_s=slot.ordered_s,
            )
        model.numerics = model.numerics or report.numerics
        model.max_length = model.max_length or report.max_length
        for one in self._models.open():  # some may have lacked only the numerics
            self.identify(one)

    def _slot_ready(self, slot: EngineSlot, report: Serving) -> None:
        if slot.swapping is None:
            slot.swapping = self._next_engine
            self._next_engine += 1
        slot.number, slot.swapping = slot.swapping, None
        self._slot_of[slot.number] = slot
        slot.ready_s = self._clock.monotonic_s()
        curve = CoordinatorFiles(Path(self._config.folder)).curve
        if not curve.exists():
            write_atomic(curve, msgspec.json.encode(report.curve))
        self._policy.put(
            events.EngineReady(
                now_s=self._clock.monotonic_s(),
                engine=slot.number,
                node=slot.node,
                model=report.model,
                curve=report.curve,
            )
        )

    def serve_failed(self, peer: Connection, failure: ServeFailed) -> None:
        """Handle an engine that cannot serve a model: retry in a new process, or fail the model."""
        slot, model = self.slots.get(peer.hello.name), self._models.get(failure.model)
        if slot is None or model is None:
            return
        if model.outcome is not None:  # the model and its weights ended meanwhile
            slot.loading = slot.serving = slot.meant_for = None
            if failure.restart:
                self._restart(slot)
            self.serve_idle()
            return
        _log.warning("Engine %s cannot serve %s: %s", slot.name, model.added.name, failure.why)
        if not failure.restart:
            slot.loading = slot.serving = slot.meant_for = None  # free for the next model
            self._listener.model_failed(
                None if failure.any_model else model, failure.why, wrong_use=True
            )
            return
        if not (slot.has_loaded or model.is_begun):  # a load in a new process failed, not a swap
            model.failed_loads += 1
            if model.failed_loads == _MAX_FAILED_LOADS:
                self._listener.model_failed(
                    model,
                    f"No engine can load {model.added.name} ({failure.why.rstrip('.')}). Check that "
                    "its files are complete; "
                    f"the logs are in {self._config.folder}/logs.",
                )
        if self._may_try_again(slot, failure.why):
            self._restart(slot, meant_for=model.number)

    def _restart(self, slot: EngineSlot, *, meant_for: int | None = None) -> None:
        self._vacate(slot)
        slot.meant_for = meant_for
        self._orders.end(slot)
        self._orders.start_again(slot)

    def identify(self, model: Model) -> None:
        """Report a model to the listener once its digest and numerics are known.

        Digest and numerics name the journal of the model's answers.
        """
        if not model.numerics:  # engines of one kind have equal numerics for all models
            model.numerics = next((other.numerics for other in self._models if other.numerics), "")
        if model.digest and model.numerics and model.answers is None and model.outcome is None:
            self._listener.model_known(model)

    def _node_of(self, slot: EngineSlot) -> Node | None:
        return next((one for one in self.nodes.values() if one.number == slot.node), None)

    # The spare engine

    def _place_spare(self, node: Node) -> None:
        """Start the spare engine on a node, and end the spare engine of another node."""
        if spare := self.slots.get(SPARE):
            self._vacate(spare)
            self._orders.end(spare)
        self._orders.ensure(SPARE, node)

    def _spare_failed(self, why: str) -> None:
        _log.warning("The engine that certifies swaps failed: %s", why)
        for slot in self._certifying.waiting():  # these engines certify themselves by a fresh load
            self._restart(slot, meant_for=slot.serving)

    # Time

    def mark_alive(self, peer: Connection) -> None:
        """Record that an engine is alive, since it sent a message."""
        if slot := self.slots.get(peer.hello.name):
            slot.heard_s = self._clock.monotonic_s()

    def is_complete(self) -> bool:
        """Return True if all expected nodes are connected, and all engines serve and reported."""
        reported = sum(node.report is not None for node in self.nodes.values())
        return reported >= self._config.nodes and all(
            slot.number is not None and slot.has_sent_all
            for slot in self.slots.values()
            if not slot.is_spare
        )

    def slot_of(self, engine: int) -> EngineSlot | None:
        """Return the slot of an engine; `engine` is the policy's number."""
        return self._slot_of.get(engine)

    def need_engines(self) -> None:
        """Start engines and read the weights, since a request without an answer has come."""
        if self._dealing.is_held:
            self._resting.end()
            self.tick()

    @property
    def is_resting(self) -> bool:
        """True while engines rest, since all answers may be in the journal."""
        return self._dealing.is_held and self._resting.has_recalled

    def _start_or_rest(self) -> None:
        """Start the engines of new nodes, unless all answers may be in the journal."""
        self._dealing.is_held = self._resting.rests(self.nodes.values())
        if self._dealing.is_held:
            for model in self._models.open():
                self.identify(model)
                if model.answers is not None and not len(model.answers):
                    self.need_engines()  # the model's journal was removed
            return
        for node in list(self.nodes.values()):
            if node.report is not None and not node.has_engines:
                self._start_engines(node)

    def tick(self) -> None:
        """Do the periodic work: deal weights, assign models and restart hung engines."""
        now_s = self._clock.monotonic_s()
        self._start_or_rest()
        self._dealing.gather(now_s)
        self._dealing.deal()
        self.serve_idle()
        for slot in list(self.slots.values()):
            if slot.peer is None and now_s - max(slot.ordered_s, slot.heard_s) > _ORDER_AGAIN_S:
                slot.orders += 1
                # The process exists but hangs before it connects.
                if slot.orders % _ORDERS_OF_ONE == 0:
                    self._orders.end(slot)
                self._orders.start_again(slot)
            if slot.cut_s is not None and now_s - slot.cut_s > _CUT_GRACE_S:
                self._vacate(slot)
            if slot.peer is not None and now_s - slot.heard_s > self._config.silent_s:
                _log.warning(
                    "Engine %s sent nothing for %.0f s and is restarted.",
                    slot.name,
                    now_s - slot.heard_s,
                )
                self._restart(slot)
                slot.heard_s = now_s
