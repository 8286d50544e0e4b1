"""Which models a fresh load is to speak for before engines answer that swapped to them, and where that load happens.

A spare engine, which answers nothing, loads each model afresh beside the others. It runs on a node that has what it is
to load; where it cannot, for `_BLOCKED_S`, because its node is gone or does not have it, another node gets it.
"""

import math
from collections.abc import Mapping

from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.dealing import Dealing
from holdfast.evaluate.coordinator.engine_slots import SPARE, EngineSlot, Node
from holdfast.evaluate.coordinator.models import Model
from holdfast.evaluate.wire.messages import Serving

_TOLERANCE = (
    1e-4  # of a log-probability, where batches make floats differ; exact engines are allowed none
)


def unfit(model: Model, said: Serving, *, is_exact: bool) -> str:
    """Why an engine must not answer as this model; empty if it may."""
    if is_exact and model.numerics and said.numerics != model.numerics:
        return f"its numerics are {said.numerics}, the others' {model.numerics}"
    if said.how != "load" and model.canary is not None:
        allowed = 0.0 if is_exact else _TOLERANCE
        if not _agree(said.canary, model.canary, allowed):
            return "after the swap its canaries differ from a fresh load's"
    return ""


def _agree(canary: list[float], reference: list[float], allowed: float) -> bool:
    if len(canary) != len(reference):
        return False
    return all(
        (math.isnan(one) and math.isnan(other)) or one == other or abs(one - other) <= allowed
        for one, other in zip(canary, reference, strict=True)
    )


_BLOCKED_S = (
    10.0  # a line that was cut is back sooner, and nodes do not get a model at the very same time
)


class Certifying:
    """See the module.

    Args:
        config: the evaluation's.
        nodes: those whose agents are connected, by name.
        slots: the engines' places, by name; somebody else keeps them.
        dealing: has the models that nodes are to have.
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
        """No spare engine stays up: from now on the first engine that changes certifies."""
        self._is_given_up = True

    def is_beside(self) -> bool:
        """Whether a spare engine certifies; else the first that changes does, by starting anew: on a GPU is no room."""
        if self._is_given_up or self._config.certify != "beside":
            return False
        has_gpus = any(node.report and node.report.gpus for node in self._nodes.values())
        return not has_gpus or self._config.spec.device == "cpu"

    def for_spare(self, slot: EngineSlot) -> list[Model]:
        """What the spare engine may load now: its first model is any that engines serve, so that the next is quick."""
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
        """Models that engines are to swap to and no fresh load has spoken for."""
        if not self.is_beside():
            return []
        engines = [
            slot for slot in self._slots.values() if not slot.is_spare and slot.serving is not None
        ]
        uncertified = []
        for model in self._dealing.wanted():
            # Those that swapped already wait for its word: they do not answer yet.
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
        """Engines that swapped, to any model or to this one, and wait for a fresh load's word to answer."""
        return [
            slot
            for slot in self._slots.values()
            if slot.peer is not None
            and slot.number is None
            and slot.serving is not None
            and slot.loading is None  # else it has not swapped yet, and serves the one before
            and (model is None or slot.serving == model.number)
        ]

    def new_home(self, now_s: float) -> Node | None:
        """The node that the spare engine is to be started on now; None while it is well where it is, or not needed."""
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
