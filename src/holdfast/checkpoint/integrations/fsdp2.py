"""Save the optimizer of a model sharded by `fully_shard`, for restores on any number of ranks.

    ckpt.save(step, {"model": model, "optimizer": ShardedOptimizer(model, optimizer)})

The model needs no wrapper, because its `state_dict` returns DTensors. An optimizer needs one for
two reasons: its `state_dict` identifies parameters only by numbers, and a new optimizer has no
state yet that shows the sharding. PyTorch's functions, which this module calls, use the names of
the parameters, and initialize the state of a new optimizer.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful


class ShardedOptimizer(Stateful):
    """Save and restore an optimizer's state by parameter names; the model need not be sharded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wrap the `optimizer` of `model`, on which `fully_shard` was already called."""
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter names; initialize it for a new optimizer."""
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's state from the result of `state_dict`."""
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=state_dict)
