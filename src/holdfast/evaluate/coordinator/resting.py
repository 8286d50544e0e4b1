"""Start no engines while every answer is known.

An engine takes seconds to start and reads all weights. If an earlier evaluation used the same
weights with the same engines on the same kind of node, its answers may still be in the journal, and
then no engine is needed. So engines rest, and no weights are read, until there is a request without
an answer.
"""

import socket
from collections.abc import Collection
from pathlib import Path

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.coordinator.engine_slots import Node, Orders
from holdfast.evaluate.coordinator.known_keys import KnownKeys
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.weights.stamp import Stamp, stamp_of

_REMEMBERED = "hf"
"""The kind of engine whose numerics are determined by spec, weights and kind of node.

Engines of other kinds ask a server or run a user's class, and the server or class may have changed.
"""


class Resting:
    """Decide whether engines rest: they are not started as long as all answers may be known.

    Once engines have been needed, they never rest again.

    Args:
        config: the evaluation's configuration.
        clock: the clock for the age of a model's files.
        models: the models, which get the remembered digests and numerics.
        orders: returns the engine spec for a node.
    """

    def __init__(
        self, config: CoordinatorConfig, clock: Clock, models: Models, orders: Orders
    ) -> None:
        self._clock, self._models, self._orders = clock, models, orders
        self._known = KnownKeys(Path(config.journals) / "known")
        self._remembers = config.spec.kind == _REMEMBERED and not config.rescore
        self._may_rest = self._remembers and not config.is_stream
        self._host = socket.gethostname()
        self._stamps: dict[int, Stamp | None] = {}
        self._recalled: set[int] = set()

    def rests(self, nodes: Collection[Node]) -> bool:
        """Return True while no engine is needed.

        The files of new models are stamped here, before their weights are read.
        """
        open_models = self._models.open()
        for model in open_models:
            self._look_at(model)
        if self._may_rest:
            reported = [node for node in nodes if node.report]
            self._may_rest = all(
                self._recall(model, node) for model in open_models for node in reported
            )
        return self._may_rest

    @property
    def has_recalled(self) -> bool:
        """True if the digest and numerics of a model were found from earlier evaluations."""
        return bool(self._recalled)

    def end(self) -> None:
        """Let the engines start, and never rest again."""
        self._may_rest = False

    def _look_at(self, model: Model) -> None:
        manifest = model.added.manifest
        if self._remembers and manifest is not None and model.number not in self._stamps:
            self._stamps[model.number] = stamp_of(manifest, self._clock.now_s())

    def _recall(self, model: Model, node: Node) -> bool:
        """Look up a model's digest and numerics from earlier evaluations; False if one is unknown.

        The tokenizer must be available too, since requests are built before any weights are read.
        """
        stamp = self._stamps.get(model.number)
        if stamp is None or not model.added.tokenizer or not self._is_here(node):
            return False
        assert node.report is not None
        digest = self._known.digest(stamp.text)
        numerics = self._known.numerics(self._orders.spec_for(node), digest, node.report.kind)
        if not digest or not numerics:
            return False
        if model.digest not in ("", digest) or model.numerics not in ("", numerics):
            return False
        if not model.digest:
            self._models.know(model, digest)
        model.numerics = numerics
        self._recalled.add(model.number)
        return True

    def _is_here(self, node: Node) -> bool:
        """Return True if a node of known kind runs on this machine and reads the stamped files."""
        return bool(node.report and node.report.kind and node.report.host == self._host)

    def fetched(self, model: Model, digest: str, nodes: Collection[Node]) -> None:
        """Remember the digest that nodes computed, unless a file changed since it was stamped."""
        before, manifest = self._stamps.get(model.number), model.added.manifest
        if before is None or not before.is_settled or manifest is None:
            return
        if not all(self._is_here(node) for node in nodes if node.report):
            return
        now = stamp_of(manifest, self._clock.now_s())
        if now is not None and now.text == before.text:
            self._known.keep_digest(now.text, digest)

    def serves(self, model: Model, node: Node | None, numerics: str) -> str:
        """Remember the numerics that an engine reported.

        Returns:
            The reason why reused answers are not valid: they were found under other numerics than
            the engine now reports. Empty if they are valid.
        """
        if not self._remembers or node is None or not self._is_here(node):
            return ""
        assert node.report is not None
        place = (self._orders.spec_for(node), model.digest, node.report.kind)
        before = self._known.numerics(*place)
        self._known.keep_numerics(*place, numerics)
        if model.number not in self._recalled or before in ("", numerics):
            return ""
        return (
            f"The engines' numerics changed undetected, from {before} to {numerics}, and some "
            f"answers of {model.added.name} were reused. Evaluate it again under another --id."
        )
