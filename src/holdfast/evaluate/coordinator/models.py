"""The models of an evaluation: in which order, where their weights are, what their answers are kept under."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.messages import AddModel, ModelOutcome


@dataclass
class Model:
    """One model that is evaluated.

    Attributes:
        added: how the command named it.
        digest: of its weights, from the first node that ever had them all; without a manifest one that no other
            evaluation shares, since nobody can tell what a server holds.
        numerics: what else its answers depend on, from the first engine that serves it.
        answers, metrics: the journals, once digest and numerics are known.
        owners: which node reads which chunk from the source; empty until that is decided.
        folders: node number to where the model lies there.
        refusals: node number to why that node failed to have it: it is not asked to read of the source again.
        is_begun: whether an engine has served it, in this life of the coordinator.
        canary: what a fresh load said to the fixed prompts; None until one did.
        failed_loads: how often a new process could not load it, before any engine served it.
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
        """Its place in the order of evaluation."""
        return self.added.model


class Models:
    """All models, oldest first. What was added and what ended outlives the coordinator, as files in `folder`.

    So do what its weights were and what its canaries are: what was scored in one life is of the weights of the next.
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
        """A model by its number."""
        return self._all.get(number)

    def add(self, added: AddModel) -> Model | None:
        """Enter a model, durably; None if it is there."""
        if added.model in self._all:
            return None
        write_atomic(self._folder / f"{added.model:06d}.added", msgspec.msgpack.encode(added))
        model = self._all[added.model] = _model(added)
        return model

    def know(self, model: Model, digest: str) -> None:
        """A node has a model's weights: what they are, durably."""
        write_atomic(self._folder / f"{model.number:06d}.digest", digest.encode())
        model.digest = digest

    def certify(self, model: Model, canary: list[float]) -> None:
        """A fresh load said the fixed prompts' log-probabilities: what swaps are held against, durably."""
        write_atomic(self._folder / f"{model.number:06d}.canary", msgspec.msgpack.encode(canary))
        model.canary = canary

    def end(self, model: Model, outcome: ModelOutcome) -> None:
        """A model's evaluation ended, durably."""
        write_atomic(self._folder / f"{model.number:06d}.ended", msgspec.msgpack.encode(outcome))
        model.outcome = outcome
        for journal in (model.answers, model.metrics):
            if journal is not None:
                journal.close()
        model.answers = model.metrics = None
        _release(model)

    def open(self) -> list[Model]:
        """Those that have not ended, oldest first."""
        return [model for model in self._all.values() if model.outcome is None]


def _model(added: AddModel) -> Model:
    return Model(added=added, digest=added.digest, numerics=added.numerics)


def _release(model: Model) -> None:
    """A stream has many models, and a manifest with its tokenizer is megabytes: nobody fetches one that ended."""
    model.added = msgspec.structs.replace(model.added, manifest=None)
    model.owners, model.canary = [], None
