"""Certify each model by a fresh load, before engines that swapped to the model may answer.

A fresh load into a new engine reports the canaries that a swap must reproduce. A spare engine,
which receives no requests, loads each model for this purpose. The spare engine runs on a node that
has the models to load. If that node is gone, or lacks the models for `_BLOCKED_S`, the spare engine
moves to another node.
"""

import math
from collections.abc import Mapping

from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.dealing import Dealing
from holdfast.evaluate.coordinator.engine_slots import SPARE, EngineSlot, Node
from holdfast.evaluate.coordinator.models import Model
from holdfast.evaluate.wire.messages import Serving

_TOLERANCE = 1e-4  # in free mode, where batching changes floats; exact engines must be equal


def unfit(model: Model, report: Serving, *, is_exact: bool) -> str:
    """Return the reason why an engine must not answer for a model; empty if it may answer."""
    if is_exact and model.numerics and report.numerics != model.numerics:
        return f"its numerics are {report.numerics}, the others' {model.numerics}"
    if report.how != "load" and model.canary is not None:
        allowed = 0.0 if is_exact else _TOLERANCE
        if not _agree(report.canary, model.canary, allowed):
            return "after the swap its canaries differ from a fresh load's"
    return ""


def _agree(canary: list[float], reference: list[float], allowed: float) -> bool:
    if len(canary) != len(reference):
        return False
    return all(
        (math.isnan(one) and math.isnan(other)) or one == other or abs(one - other) <= allowed
        for one, other in zip(canary, reference, strict=True)
    )


# Long enough for a cut connection to return, and for all nodes to receive a model.
_BLOCKED_S = 10.0


class Certifying:
    """Choose the models that need a certificate, and the node of the spare engine.

    Args:
        config: the evaluation's configuration.
        nodes: the nodes with connected agents, by name.
        slots: the engine slots, by name; owned by the engine pool.
        dealing: lists the models that nodes should have now.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        nodes: Mapping[str, Node],
        slots: Mapping[str, EngineSlot],
        dealing: Dealing,
    ) -> None:
        self._config, self._nodes, self._slots, self._dealing = config, nodes, slots, dealing
        self._blocked_since_s: float | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        """Stop using a spare engine.

        From now on, the first engine that should swap to a model restarts instead, and its fresh
        load certifies the model.
        """
        self._is_given_up = True

    def is_beside(self) -> bool:
        """Return True if a spare engine certifies the models.

        On GPUs there is no memory for a spare engine. There, the first engine that should swap
        restarts instead, and its fresh load certifies the model.
        """
        if self._is_given_up or self._config.certify != "beside":
            return False
        has_gpus = any(node.report and node.report.gpus for node in self._nodes.values())
        return not has_gpus or self._config.spec.device == "cpu"

    def for_spare(self, slot: EngineSlot) -> list[Model]:
        """List the models that the spare engine may load now.

        The list has the models that still need a certificate. If there are none, and the engine has
        loaded no model yet, it may load any model that engines serve: later loads are quicker in a
        process that has loaded a model before.
        """
        serving = {
            one.serving
            for one in self._slots.values()
            if not one.is_spare and one.number is not None
        }
        first = (
            []
            if slot.has_loaded
            else [model for model in self._dealing.wanted() if model.number in serving]
        )
        return self.uncertified() or first

    def uncertified(self) -> list[Model]:
        """List the models that engines will swap to and that no fresh load has certified."""
        if not self.is_beside():
            return []
        engines = [
            slot for slot in self._slots.values() if not slot.is_spare and slot.serving is not None
        ]
        uncertified = []
        for model in self._dealing.wanted():
            # An engine that has swapped without a certificate has no number: it answers only once
            # the model is certified.
            is_swapped_to = any(
                slot.serving != model.number or slot.number is None for slot in engines
            )
            if (
                model.canary is None
                and model.added.manifest is not None
                and model.folders
                and is_swapped_to
            ):
                uncertified.append(model)
        return uncertified

    def waiting(self, model: Model | None = None) -> list[EngineSlot]:
        """List the engines that have swapped to a model and wait until the model is certified.

        `model` restricts the list to one model.
        """
        return [
            slot
            for slot in self._slots.values()
            if slot.peer is not None
            and slot.number is None
            and slot.serving is not None
            and slot.loading is None  # otherwise still serving the previous model
            and (model is None or slot.serving == model.number)
        ]

    def new_home(self, now_s: float) -> Node | None:
        """Return the node on which to start the spare engine now; None if no start is needed."""
        homes = {number for model in self.uncertified() for number in model.folders}
        spare, here = self._slots.get(SPARE), {node.number: node for node in self._nodes.values()}
        if not homes or (spare is not None and spare.node in homes & here.keys()):
            self._blocked_since_s = None
            return None
        if spare is not None:
            if self._blocked_since_s is None:
                self._blocked_since_s = now_s
            if now_s - self._blocked_since_s < _BLOCKED_S:
                return None
        self._blocked_since_s = None
        return next((here[number] for number in sorted(homes & here.keys())), None)
