"""Weights to nodes: each model is read once per cluster.

A model's chunks are dealt to the nodes that are there; each reads its own and has the others from its peers. At most
`_AHEAD` models lie in a node's memory besides the one that is evaluated.
"""

from collections.abc import Mapping

from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.seats import Node
from holdfast.evaluate.coordinator.wire import FetchModel, ReleaseModel
from holdfast.evaluate.weights.assign import assign, reassign

_AHEAD = 1


class Dealing:
    """See the module. `nodes` are those whose agents are connected, by name; somebody else keeps them."""

    def __init__(self, config: CoordinatorConfig, models: Models, nodes: Mapping[str, Node]) -> None:
        self._config, self._models, self._nodes = config, models, nodes
        self._first_node_s: float | None = None
        self._gathered = False

    def gather(self, now_s: float) -> None:
        """Dealing begins when all nodes are there, or were waited for long enough."""
        reported = sum(node.report is not None for node in self._nodes.values())
        if self._gathered or not reported:
            return
        if self._first_node_s is None:
            self._first_node_s = now_s
        self._gathered = reported >= self._config.nodes or now_s - self._first_node_s >= self._config.gather_s

    def wanted(self) -> list[Model]:
        """The models that nodes are to have, the one that is evaluated first."""
        return self._models.open()[: 1 + _AHEAD]

    def deal(self) -> None:
        """Tell every node what to fetch: chunks have owners among the nodes that are there."""
        nodes = {node.number: node for node in self._nodes.values() if node.report}
        if not nodes or not self._gathered or self._config.rescore:
            return
        for place, model in enumerate(self.wanted()):
            if model.added.manifest is not None:
                self._deal_model(model, nodes, max_read_mib_s=self._config.max_read_mib_s if place else 0.0)

    def _deal_model(self, model: Model, nodes: Mapping[int, Node], *, max_read_mib_s: float) -> None:
        manifest = model.added.manifest
        assert manifest is not None
        peers = {number: node.report.store for number, node in nodes.items() if node.report}
        if not model.owners:
            model.owners = assign(manifest, sorted(nodes))
        elif set(model.owners) - set(nodes):
            have = dict.fromkeys(model.folders, range(len(model.owners)))
            model.owners = reassign(manifest, model.owners, have, sorted(nodes))
        for node in nodes.values():
            if model.number in node.told and node.told[model.number] == model.owners:
                continue
            node.told[model.number] = model.owners
            node.peer.send(
                FetchModel(
                    model=model.number,
                    manifest=manifest,
                    owners=model.owners,
                    peers=peers,
                    max_read_mib_s=max_read_mib_s,
                )
            )

    def release(self, model: Model) -> None:
        """A model ended: each node frees its memory."""
        model.owners = []
        for node in self._nodes.values():
            node.told.pop(model.number, None)
            node.peer.send(ReleaseModel(model=model.number))
        model.folders.clear()
