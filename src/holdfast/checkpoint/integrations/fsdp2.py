"""Save the optimizer of a model sharded by `fully_shard`, so that any number of ranks can restore.

    ckpt.save(step, {"model": model, "optimizer": ShardedOptimizer(model, optimizer)})

The model needs no wrapper: its `state_dict` returns DTensors. An optimizer's `state_dict` numbers
the parameters, and a fresh optimizer has no state that shows the sharding. PyTorch's functions used
here name the parameters, and initialize the state.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful


class ShardedOptimizer(Stateful):
    """An optimizer's state by parameter names; also for models that are not sharded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wrap the `model`, after `fully_shard`, and its `optimizer`."""
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; initialize the state of a fresh optimizer."""
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's state."""
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=state_dict)
