"""Find the tensors that only an optimizer's step changes: its parameters and its state.

Forward or backward may write to all other tensors (buffers of modules, averages, metrics). Ranks
that hold replicas of one model may have different values in these other tensors.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.state.tensors import local

_Place = tuple[torch.device, int]


class OptimizerTensors:
    """Record the optimizers of this process that have made a step, without keeping them alive."""

    def __init__(self) -> None:
        """Record every optimizer when it makes a step, from now on until `close`."""
        seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Another thread may iterate over the optimizers while one is added.
        lock = threading.Lock()
        self._seen, self._lock = seen, lock

        def record(optimizer: torch.optim.Optimizer) -> None:
            if optimizer not in seen:
                with lock:
                    seen.add(optimizer)

        self._unhook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: record(optimizer)
        ).remove

    def close(self) -> None:
        """Stop recording optimizers."""
        self._unhook()

    def add(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record optimizers that may not have made a step yet, such as those in a saved state."""
        with self._lock:
            self._seen.update(optimizers)

    def owned(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor whether it shares memory with a recorded optimizer's tensors.

        These are the optimizer's parameters and state. Tensors are compared by the address of their
        storage, so the detached tensors of a state dict match, too. A tensor without storage memory
        never matches.
        """
        return sharing_memory(tensors, self._tensors())

    def __len__(self) -> int:
        """Return the number of optimizers that were recorded."""
        return len(self._seen)

    def _tensors(self) -> Iterator[torch.Tensor]:
        with self._lock:
            optimizers = list(self._seen)
        # Iterate over lists, because an optimizer may make its state meanwhile.
        for optimizer in optimizers:
            for group in list(optimizer.param_groups):
                yield from list(group["params"])
            for state in list(optimizer.state.values()):
                if isinstance(state, dict):
                    yield from (
                        value for value in list(state.values()) if isinstance(value, torch.Tensor)
                    )


def sharing_memory(tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether one of `others` has the same storage."""
    places = {place for each in others if (place := _place(each)) is not None}
    return [_place(each) in places for each in tensors]


def _place(tensor: torch.Tensor) -> _Place | None:
    try:
        own = local(tensor)
        address = own.untyped_storage().data_ptr()
    # Uninitialized, sparse, or a wrapper without storage.
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return (own.device, address) if address else None
