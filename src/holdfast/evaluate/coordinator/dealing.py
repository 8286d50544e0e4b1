"""Assign each model's chunks to nodes, so that a cluster reads each model only once.

Each connected node reads its own chunks from the source and receives the other chunks from its
peers. A node's memory holds at most `_AHEAD` models besides the model in evaluation.

A node that failed to read a model is assigned no more chunks of it, but may receive all chunks from
peers. Such a node gets a new `FetchModel` only if the owners of the chunks change, or if the read
limit of the model is lifted. So a lasting failure repeats only a bounded number of times. A node
with full memory gets a new `FetchModel` when a model in its memory has ended.
"""

from collections.abc import Mapping

from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.engine_slots import Node
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.weights.assign import assign, reassign
from holdfast.evaluate.wire.messages import FetchFailed, FetchModel, ReleaseModel

_AHEAD = 1


class Dealing:
    """Assign chunks to nodes; `nodes` are the connected nodes by name, owned by the engine pool."""

    def __init__(
        self, config: CoordinatorConfig, models: Models, nodes: Mapping[str, Node]
    ) -> None:
        self._config, self._models, self._nodes = config, models, nodes
        self._first_node_s: float | None = None
        self._gathered = False
        self._left_s: float | None = None
        self.is_held = False
        """True while engines rest, so that no weights are read."""

    def gather(self, now_s: float) -> None:
        """Allow `deal` once all nodes are connected, or `gather_s` seconds have passed.

        If a node left, the other nodes wait `gather_s` seconds for its return. After that, nodes
        that failed to read a model may try again.
        """
        if self._left_s is not None and now_s - self._left_s >= self._config.gather_s:
            self._left_s = None
            for model in self._models:
                for node in self._nodes.values():
                    if model.refusals.pop(node.number, None):
                        node.sent_fetches.pop(model.number, None)
        reported = sum(node.report is not None for node in self._nodes.values())
        if self._gathered or not reported:
            return
        if self._first_node_s is None:
            self._first_node_s = now_s
        self._gathered = (
            reported >= self._config.nodes or now_s - self._first_node_s >= self._config.gather_s
        )

    def wanted(self) -> list[Model]:
        """List the models that nodes should have now; the model in evaluation comes first."""
        return self._models.open()[: 1 + _AHEAD]

    def deal(self) -> None:
        """Send `FetchModel` to every node whose chunks changed; only connected nodes own chunks."""
        nodes = {node.number: node for node in self._nodes.values() if node.report}
        if not nodes or not self._gathered or self.is_held or self._config.rescore:
            return
        for place, model in enumerate(self.wanted()):
            if model.added.manifest is not None:
                self._deal_model(
                    model, nodes, max_read_mib_s=self._config.max_read_mib_s if place else 0.0
                )

    def _deal_model(
        self, model: Model, nodes: Mapping[int, Node], *, max_read_mib_s: float
    ) -> None:
        manifest = model.added.manifest
        assert manifest is not None
        crowded = {number for number, node in nodes.items() if self._is_crowded(node, model)}
        readers = sorted(nodes.keys() - crowded - model.refusals.keys())
        if not readers:  # wait until a node has room or reconnects
            if not model.folders:
                model.owners = []
            return
        peers = {number: node.report.store for number, node in nodes.items() if node.report}
        if not model.owners:
            model.owners = assign(manifest, readers)
        elif set(model.owners) - set(readers):
            have = dict.fromkeys(model.folders, range(len(model.owners)))
            model.owners = reassign(manifest, model.owners, have, readers)
        for number, node in nodes.items():
            owners, rate_mib_s = node.sent_fetches.get(model.number, (None, 0.0))
            is_told = owners == model.owners and (
                rate_mib_s == max_read_mib_s or number in model.folders
            )
            if number in crowded or is_told:
                continue
            node.crowded.pop(model.number, None)
            node.sent_fetches[model.number] = (model.owners, max_read_mib_s)
            node.peer.send(
                FetchModel(
                    model=model.number,
                    manifest=manifest,
                    owners=model.owners,
                    peers=peers,
                    max_read_mib_s=max_read_mib_s,
                )
            )

    def failed(self, node: Node, model: Model, failure: FetchFailed) -> str:
        """Record that a node cannot fetch a model.

        Returns:
            The reason why no node can fetch the model; "" if some node may still fetch it.
        """
        if failure.final:
            return failure.why
        if failure.beside:
            node.crowded[model.number] = failure.beside
            node.sent_fetches.pop(model.number, None)
            # The release may be on its way, or was lost with the connection.
            for number in failure.beside:
                if not self._is_open(number):
                    node.peer.send(ReleaseModel(model=number))
            return ""
        model.refusals[node.number] = failure.why
        if self._left_s is not None or any(
            one.number not in model.refusals for one in self._nodes.values()
        ):
            return ""
        if len(reasons := set(model.refusals.values())) == 1:
            return reasons.pop()
        refusals = " ".join(
            f"Node {number}: {why}" for number, why in sorted(model.refusals.items())
        )
        return f"No node can hold {model.added.name}. {refusals}"

    def fetched(self, node: Node, model: Model, folder: str) -> None:
        """Record that a node holds a whole model."""
        model.folders[node.number] = folder
        model.refusals.pop(node.number, None)
        node.crowded.pop(model.number, None)
        node.sent_fetches.setdefault(model.number, (model.owners, 0.0))

    def node_left(self, node: Node, now_s: float) -> None:
        """Forget the models that a node held and its failures, since the node left."""
        self._left_s = now_s
        for model in self._models:
            model.folders.pop(node.number, None)
            model.refusals.pop(node.number, None)

    def _is_crowded(self, node: Node, model: Model) -> bool:
        """Return True if the node's memory is full of models that have not ended.

        The function returns False if the node never reported that `model` did not fit.
        """
        beside = node.crowded.get(model.number)
        return beside is not None and all(map(self._is_open, beside))

    def _is_open(self, number: int) -> bool:
        model = self._models.get(number)
        return model is not None and model.outcome is None

    def release(self, model: Model) -> None:
        """Free an ended model's memory on every node."""
        model.owners = []
        for node in self._nodes.values():
            node.sent_fetches.pop(model.number, None)
            node.crowded.pop(model.number, None)
            node.peer.send(ReleaseModel(model=model.number))
        model.folders.clear()
