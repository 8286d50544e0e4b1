"""Track which task of which model runs on which host, and keep the outcomes of tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.coordinator.models import Model
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.harness import ModelFacts
from holdfast.evaluate.types.suite import Suite
from holdfast.evaluate.wire.messages import Prepare, Prepared, RunTask, TaskOutcome
from holdfast.evaluate.wire.server import Connection

_ABSENCE_S = 3.0  # after this absence, the tasks of a host move; a cut connection returns sooner


@dataclass
class ConnectedHost:
    """A node's connected harness host."""

    peer: Connection
    node: int
    prepared: bool = False
    running: set[tuple[int, int]] = field(default_factory=set)
    """The (model, task) pairs that run on this host."""


class Tasks:
    """Run every task of every model once.

    The outcome of each task is stored in a file, so that a restarted coordinator finds it. Outcomes
    are not held in memory, since results are large and an evaluation may go through many
    checkpoints.
    """

    def __init__(
        self, suite: Suite, spec: EngineSpec, nodes: int, folder: Path, results: Path
    ) -> None:
        self._suite, self._spec, self._nodes, self._folder, self._results = (
            suite,
            spec,
            nodes,
            folder,
            results,
        )
        self._absent_since_s: dict[int, float] = {}
        results.mkdir(parents=True, exist_ok=True)
        self.hosts: dict[str, ConnectedHost] = {}
        names = [path.stem.split("-") for path in results.glob("*.outcome")]
        self._ended = {(int(model), int(task)) for model, task in names}

    def host_joined(self, peer: Connection) -> None:
        """Add a host and order it to prepare."""
        self.hosts[peer.hello.name] = ConnectedHost(peer=peer, node=peer.hello.node)
        peer.send(
            Prepare(
                entries=list(self._suite.entries),
                include_paths=list(self._suite.include_paths),
                confirm_unsafe_code=self._suite.confirm_unsafe_code,
                folder=str(self._folder),
            )
        )

    def host_left(self, peer: Connection) -> None:
        """Remove a host; `start` starts its tasks on another host."""
        self.hosts.pop(peer.hello.name, None)

    def prepared(self, peer: Connection, _prepared: Prepared) -> None:
        """Record that a host can run tasks."""
        self.hosts[peer.hello.name].prepared = True

    def host_on(self, node: int) -> ConnectedHost | None:
        """Return a prepared host on a node; None if there is none."""
        return next(
            (host for host in self.hosts.values() if host.node == node and host.prepared), None
        )

    def start(self, models: Sequence[Model], now_s: float) -> None:
        """Start every open task on the host of its own node.

        A task's own node follows from the task's number, so that a restarted coordinator finds a
        running task again. If that node has no host for a while, the task starts on another node.
        """
        running = {one for host in self.hosts.values() for one in host.running}
        for model in models:
            for task, entry in enumerate(self._suite.entries):
                if (model.number, task) in running or (model.number, task) in self._ended:
                    continue
                host = self._host_for(task, now_s)
                if host and (able := self.able_host(model, host.node)):
                    host, facts = able
                    host.running.add((model.number, task))
                    folder = model.added.folder or str(self._folder)
                    host.peer.send(RunTask(task=task, entry=entry, facts=facts, folder=folder))

    def _host_for(self, task: int, now_s: float) -> ConnectedHost | None:
        own = task % self._nodes
        if host := self.host_on(own):
            self._absent_since_s.pop(own, None)
            return host
        if now_s - self._absent_since_s.setdefault(own, now_s) < _ABSENCE_S:
            return None
        others = [host for host in self.hosts.values() if host.prepared]
        return min(others, key=lambda one: len(one.running), default=None)

    def is_elsewhere(self, model: int, task: int, node: int) -> bool:
        """Return True if a task runs on another node: its client on this node is obsolete."""
        return any(
            (model, task) in host.running and host.node != node for host in self.hosts.values()
        )

    def able_host(self, model: Model, node: int) -> tuple[ConnectedHost, ModelFacts] | None:
        """Return a host that can work on a model, and the model's facts; None if there is none.

        The host is on `node`. If `node` failed to fetch the model, the host may be on another node.
        """
        others = [host.node for host in self.hosts.values()] if node in model.refusals else []
        for place in (node, *others):
            host, facts = self.host_on(place), self.facts(model, place)
            if host and facts:
                return host, facts
        return None

    def facts(self, model: Model, node: int) -> ModelFacts | None:
        """Return a model's facts for clients on a node; None until its tokenizer is available."""
        manifest = model.added.manifest
        tokenizer, takes_text = "", False
        if manifest is None:
            tokenizer = str(self._spec.options.get("tokenizer", ""))
            takes_text = not tokenizer
        elif model.added.tokenizer:
            tokenizer = model.added.tokenizer  # available before the weights
        elif not (tokenizer := model.folders.get(node, "")):
            return None
        return ModelFacts(
            model=model.number,
            name=model.added.name,
            tokenizer=tokenizer,
            max_length=self._spec.max_length,
            takes_text=takes_text,
        )

    def ended(self, outcome: TaskOutcome) -> bool:
        """Write the outcome of a task to disk; return False if the task already had an outcome."""
        for host in self.hosts.values():
            host.running.discard((outcome.model, outcome.task))
        if (outcome.model, outcome.task) in self._ended:
            return False
        write_atomic(self._file_of(outcome.model, outcome.task), msgspec.msgpack.encode(outcome))
        self._ended.add((outcome.model, outcome.task))
        return True

    def forget(self, model: int) -> None:
        """Stop counting an ended model's tasks as running."""
        for host in self.hosts.values():
            host.running = {place for place in host.running if place[0] != model}

    def of_model(self, model: int) -> Iterator[TaskOutcome]:
        """Yield the outcomes of a model's ended tasks."""
        for task in range(len(self._suite.entries)):
            if (model, task) in self._ended:
                yield msgspec.msgpack.decode(
                    self._file_of(model, task).read_bytes(), type=TaskOutcome
                )

    def _file_of(self, model: int, task: int) -> Path:
        return self._results / f"{model:06d}-{task:04d}.outcome"

    def are_all_ended(self, model: int) -> bool:
        """Return True if all tasks of a model have ended."""
        return all((model, task) in self._ended for task in range(len(self._suite.entries)))
