"""The optimizer of a model that `fully_shard` has sharded, as a state that any number of ranks restores.

    ckpt.save(step, {"model": model, "optimizer": ShardedOptimizer(model, optimizer)})

The model needs nothing: its `state_dict` gives DTensors. An optimizer's names parameters by numbers, and a fresh one
has nothing yet that could say how its state is sharded; PyTorch's own functions give it names, and its state at once.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful


class ShardedOptimizer(Stateful):
    """An optimizer's state by the names of the parameters; also of a model that is not sharded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Both as they are trained, `model` after `fully_shard`."""
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Its state; a fresh optimizer gets one, by a step that changes no parameter."""
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=state_dict)
