"""Record and restore the state that determines the order of an epoch's batches.

The order depends on random generators, and on the epoch number that was set in a sampler. When an
epoch begins, a loader draws its order from the generators of the process, or from the generators of
the loader and its samplers. If these generators have the recorded states when another process
begins the epoch, the order is the same.
"""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch

from holdfast.checkpoint.state import random_state

_PARTS: Final = (
    "",
    "sampler",
    "batch_sampler",
    "batch_sampler.sampler",
    "batch_sampler.batch_sampler",
    "dataset",
)
"""The parts of a loader that may have a generator or an epoch number; "" is the loader itself."""
_OTHERS: Final = "others"
"""The key for the states of Python's and NumPy's generators, stored as JSON in bytes."""


@dataclass(kw_only=True)
class Order:
    """Hold the state on which the order of one epoch depends, as of the start of that epoch."""

    process: dict[str, Any] | None = None
    """The states of the process's generators, see `_packed`; None if the present ones are right."""
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """The states of the generators of the loader and its samplers, by the name of the part."""
    epochs: dict[str, int] = field(default_factory=dict)
    """The epoch numbers that `set_epoch` has set, by the name of the part."""

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Record the state that determines the order of the epoch that `loader` begins now."""
        epochs = {name: _epoch_of(part) for name, part in _parts(loader)}
        return cls(process=_packed(random_state.capture()), own=_own(loader), epochs=_known(epochs))

    @classmethod
    def of_next(cls, loader: Any) -> Self:
        """Record the state for the order of a later epoch, as far as it is known now.

        The script sets the rest before that epoch, such as the epoch number of a sampler.
        """
        counts = {name: _count_of(part) for name, part in _parts(loader)}
        return cls(own=_own(loader), epochs=_known(counts))

    @contextmanager
    def put_back(self, loader: Any) -> Iterator[None]:
        """Restore this state inside the block, so that a loader has the same order there.

        After the block, the generators of the process have their former states again.
        """
        self.put_back_counts(loader)
        self.put_back_own(loader)
        if self.process is None:
            yield
            return
        now = random_state.capture()
        random_state.put_back(_unpacked(self.process))
        try:
            yield
        finally:
            random_state.put_back(now)

    @contextmanager
    def kept(self, loader: Any) -> Iterator[None]:
        """Run the block; then set the generators of the loader and the process to this state."""
        try:
            yield
        finally:
            self.put_back_own(loader)
            if self.process is not None:
                random_state.put_back(_unpacked(self.process))

    def put_back_counts(self, loader: Any) -> None:
        """Set the recorded epoch numbers in a loader and its samplers."""
        parts = dict(_parts(loader))
        for name, epoch in self.epochs.items():
            if name in parts and callable(getattr(parts[name], "set_epoch", None)):
                parts[name].set_epoch(epoch)

    def put_back_own(self, loader: Any) -> None:
        """Set the recorded states of the generators of a loader and its samplers."""
        for name, generator in _generators(loader):
            if name in self.own:
                generator.set_state(self.own[name])

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values and tensors."""
        return {"process": self.process, "own": dict(self.own), "epochs": dict(self.epochs)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild the object from the result of `to_plain`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError, RuntimeError: `plain` is not such a
                result.
        """
        process = plain["process"]
        if process is not None:
            process = {name: _on_cpu(part) for name, part in dict(process).items()}
            states = _unpacked(process)
            random.Random().setstate(states["python"])
            torch.Generator().set_state(states["torch"])
        own = {str(name): state.cpu() for name, state in dict(plain["own"]).items()}
        epochs = {str(name): int(epoch) for name, epoch in dict(plain["epochs"]).items()}
        return cls(process=process, own=own, epochs=epochs)


def _packed(states: dict[str, Any]) -> dict[str, Any]:
    """Pack the states of `random_state.capture` for a checkpoint.

    All numbers outside tensors become one value, since each value in a checkpoint has a cost.
    """
    tensors = {name: one for name, one in states.items() if isinstance(one, torch.Tensor)}
    others = {name: one for name, one in states.items() if name not in tensors}
    return {**tensors, _OTHERS: json.dumps(others).encode()}


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    others = json.loads(packed[_OTHERS])
    version, numbers, gauss = others["python"]
    tensors = {name: one for name, one in packed.items() if name != _OTHERS}
    return {**tensors, **others, "python": (version, tuple(numbers), gauss)}


def _epoch_of(part: Any) -> Any:
    return getattr(part, "epoch", _count_of(part)) if hasattr(part, "set_epoch") else None


def _count_of(part: Any) -> Any:
    """Return the epoch number that a part counts by itself, as Accelerate's loaders do, or None."""
    return getattr(part, "iteration", None) if hasattr(part, "set_epoch") else None


def _known(epochs: Mapping[str, Any]) -> dict[str, int]:
    return {name: epoch for name, epoch in epochs.items() if type(epoch) is int}


def _on_cpu(part: Any) -> Any:
    return part.cpu() if isinstance(part, torch.Tensor) else part


def _parts(loader: Any) -> list[tuple[str, Any]]:
    """Return the parts of a loader with their names, each part only once."""
    found: dict[int, tuple[str, Any]] = {}
    for name in _PARTS:
        part = loader
        for attribute in name.split(".") if name else ():
            part = getattr(part, attribute, None)
        if part is not None:
            found.setdefault(id(part), (name, part))
    return list(found.values())


def _generators(loader: Any) -> list[tuple[str, torch.Generator]]:
    found: dict[int, tuple[str, torch.Generator]] = {}
    for name, part in _parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), (name, generator))
    return list(found.values())


def _own(loader: Any) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _generators(loader)}
