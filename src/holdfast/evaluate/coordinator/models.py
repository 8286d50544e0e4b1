"""Keep the models of an evaluation: their order, their weights and their journals."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.messages import AddModel, ModelOutcome


@dataclass
class Model:
    """One model of the evaluation.

    Attributes:
        added: the command's message that added the model.
        digest: the digest of the weights, from the first node that held them all. Without a
            manifest, a digest that no other evaluation shares, since the weights on the server are
            unknown.
        numerics: everything else that the answers' bits depend on, except the requests, from the
            first engine that served the model.
        answers, metrics: the journals; None until digest and numerics are known.
        owners: for each chunk, the number of the node that reads it from the source; empty until
            chunks are assigned.
        folders: node number to the model's folder on that node.
        refusals: node number to the reason why that node failed; the node reads no more from the
            source.
        is_begun: True if an engine has served the model since the coordinator's last restart.
        canary: the log-probabilities of the fixed prompts after a fresh load; None before a fresh
            load.
        failed_loads: how often a new process failed to load the model, before any engine served it.
    """

    added: AddModel
    digest: str = ""
    numerics: str = ""
    answers: Journal | None = None
    metrics: Journal | None = None
    owners: list[int] = field(default_factory=list)
    folders: dict[int, str] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    is_begun: bool = False
    canary: list[float] | None = None
    failed_loads: int = 0
    max_length: int = 0
    added_s: float = 0.0
    outcome: ModelOutcome | None = None

    @property
    def number(self) -> int:
        """The model's position in the order of evaluation, from 0."""
        return self.added.model


class Models:
    """Keep all models, oldest first, as files in `folder` that outlive the coordinator.

    The digests and canaries are kept too, so that all scores of an evaluation belong to the same
    weights.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._all: dict[int, Model] = {}
        for path in sorted(folder.glob("*.added")):
            model = _model(msgspec.msgpack.decode(path.read_bytes(), type=AddModel))
            self._all[model.number] = model
            digest = path.with_suffix(".digest")
            if digest.exists():
                model.digest = digest.read_text()
            canary = path.with_suffix(".canary")
            if canary.exists():
                model.canary = msgspec.msgpack.decode(canary.read_bytes(), type=list[float])
            ended = path.with_suffix(".ended")
            if ended.exists():
                model.outcome = msgspec.msgpack.decode(ended.read_bytes(), type=ModelOutcome)
                _release(model)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._all.values()))

    def get(self, number: int) -> Model | None:
        """Return a model by its number."""
        return self._all.get(number)

    def add(self, added: AddModel) -> Model | None:
        """Write a model to disk and return it; None if the number already exists."""
        if added.model in self._all:
            return None
        write_atomic(self._folder / f"{added.model:06d}.added", msgspec.msgpack.encode(added))
        model = self._all[added.model] = _model(added)
        return model

    def know(self, model: Model, digest: str) -> None:
        """Write the digest of a model's weights to disk."""
        write_atomic(self._folder / f"{model.number:06d}.digest", digest.encode())
        model.digest = digest

    def certify(self, model: Model, canary: list[float]) -> None:
        """Write the canaries of a fresh load to disk, as the reference for swaps."""
        write_atomic(self._folder / f"{model.number:06d}.canary", msgspec.msgpack.encode(canary))
        model.canary = canary

    def end(self, model: Model, outcome: ModelOutcome) -> None:
        """Write the outcome of a model to disk and free its journals."""
        write_atomic(self._folder / f"{model.number:06d}.ended", msgspec.msgpack.encode(outcome))
        model.outcome = outcome
        for journal in (model.answers, model.metrics):
            if journal is not None:
                journal.close()
        model.answers = model.metrics = None
        _release(model)

    def open(self) -> list[Model]:
        """List the models that have not ended, oldest first."""
        return [model for model in self._all.values() if model.outcome is None]


def _model(added: AddModel) -> Model:
    return Model(added=added, digest=added.digest, numerics=added.numerics)


def _release(model: Model) -> None:
    """Free an ended model's manifest and tokenizer: over a long stream they fill the memory."""
    model.added = msgspec.structs.replace(model.added, manifest=None)
    model.owners, model.canary = [], None
