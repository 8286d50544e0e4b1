"""What one rank puts into a checkpoint: its part of the user's state, and what is its own.

Under the name `holdfast`, beside the user's entries:

| flat name | what |
|---|---|
| `holdfast.structure` | the skeleton of the shared state, of all ranks together |
| `holdfast.rank-N.structure` | the skeleton of what follows |
| `holdfast.rank-N.user.…` | `per_rank` of rank N |
| `holdfast.rank-N.rng.…` | the random generators of rank N |

The rank in the name keeps DCP from merging what differs by rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import rng
from holdfast.checkpoint.tree import FlatState, Skeleton, flatten
from holdfast.core.errors import BadUse

OWN_NAME = "holdfast"
STRUCTURE = f"{OWN_NAME}.structure"


def rank_structure(rank: int) -> str:
    """The flat name of the skeleton of what belongs to `rank`."""
    return f"{OWN_NAME}.rank-{rank}.structure"


def has_state_dict(value: Any) -> bool:
    """Whether `value` is an object that gives its state and takes it back, as modules and optimizers do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with each such object replaced by its `state_dict()`.

    Raises:
        BadUse: it is not a dict of named entries, or uses the name `holdfast`.
    """
    if not isinstance(state, Mapping):
        raise BadUse(f"The state must be a dict of named entries, not a {type(state).__name__}.")
    for name in state:
        if not isinstance(name, str) or name.split(".")[0] == OWN_NAME:
            raise BadUse(f"The state has an entry {name!r}. Use text that does not begin with '{OWN_NAME}'.")
    return {name: value.state_dict() if has_state_dict(value) else value for name, value in state.items()}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """`shared`: the user's state. `own`: what belongs to `rank`. Tensors are the live ones, not copies."""

    rank: int
    shared: dict[str, Any]
    own: dict[str, Any]
    flat_shared: FlatState
    flat_own: FlatState

    def for_dcp(self, structure: Skeleton | None) -> dict[str, Any]:
        """The nested dict to hand to DCP; `structure` on the one rank that writes it."""
        # In a tuple, because DCP takes dicts apart and keeps a tuple whole.
        own = {**self.own, "structure": (self.flat_own.skeleton,)}
        ours: dict[str, Any] = {f"rank-{self.rank}": own}
        if structure is not None:
            ours["structure"] = (structure,)
        return {**self.shared, OWN_NAME: ours}

    def names(self) -> set[str]:
        """Every flat name of this rank that must be found in the checkpoint."""
        return {*self.flat_shared.leaves, *self.flat_own.leaves, rank_structure(self.rank)}

    def plain_names(self) -> list[str]:
        """The flat names of this rank's plain values."""
        leaves = {**self.flat_shared.leaves, **self.flat_own.leaves}
        return [name for name, value in leaves.items() if not isinstance(value, torch.Tensor)]

    def size_bytes(self) -> tuple[int, int]:
        """Bytes of tensors: those that all ranks have alike, and those of this rank alone."""
        alike = alone = 0
        for value in self.flat_shared.leaves.values():
            if isinstance(value, DTensor):
                alone += value.to_local().nbytes
            elif isinstance(value, torch.Tensor):
                alike += value.nbytes
        alone += sum(value.nbytes for value in self.flat_own.leaves.values() if isinstance(value, torch.Tensor))
        return alike, alone


def collect(
    rank: int,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    per_rank: Mapping[str, Any] | None,
) -> Contents:
    """Take stock of what one rank has to save.

    Raises:
        BadUse: something in it cannot be saved; the message names it.
    """
    shared = state_dicts(state() if callable(state) else state)
    # The generators last: a user's state_dict() may draw from them.
    own = {"user": state_dicts(per_rank or {}), "rng": rng.capture()}
    return Contents(
        rank=rank,
        shared=shared,
        own=own,
        flat_shared=flatten(shared),
        flat_own=flatten(own, prefix=f"{OWN_NAME}.rank-{rank}."),
    )
