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

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import rng
from holdfast.checkpoint.tree import FlatState, LiveTensors, Skeleton, capture, flatten
from holdfast.core.errors import BadUse

Outline = tuple[list[str], list[str], Skeleton, Skeleton]
OWN_NAME = "holdfast"
STRUCTURE = f"{OWN_NAME}.structure"


def rank_structure(rank: int) -> str:
    """The flat name of the skeleton of what belongs to `rank`."""
    return f"{OWN_NAME}.rank-{rank}.structure"


def has_state_dict(value: Any) -> bool:
    """Whether `value` is an object that gives its state and takes it back, as modules and optimizers do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_named(state: Any) -> None:
    """Check for a dict of named entries.

    Raises:
        BadUse: it is none, or uses the name `holdfast`.
    """
    if not isinstance(state, Mapping):
        raise BadUse(
            f"The state must be a dict of named entries, not a {type(state).__name__}. Give {{'model': model, …}}."
        )
    for name in state:
        if not isinstance(name, str):
            raise BadUse(f"The state has an entry {name!r}. Names of entries are text.")
        if name.split(".")[0] == OWN_NAME:
            raise BadUse(f"The state has an entry {name!r}. Use a name that does not begin with '{OWN_NAME}'.")


def state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with each such object replaced by its `state_dict()`.

    Raises:
        BadUse: see `check_named`.
    """
    check_named(state)
    return {name: value.state_dict() if has_state_dict(value) else value for name, value in state.items()}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """`shared`: the user's state. `own`: what belongs to `rank`. `tensors`: those of both, live, as they come.

    `objects`: the entries of both that gave their state themselves.
    """

    rank: int
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: LiveTensors
    objects: tuple[Any, ...] = ()

    @functools.cached_property
    def _flat(self) -> tuple[FlatState, FlatState]:
        return flatten(self.shared), flatten(self.own, prefix=f"{OWN_NAME}.rank-{self.rank}.")

    @property
    def skeleton(self) -> dict[Any, Any]:
        """The shape of the user's state on this rank.

        Raises:
            BadUse: something in it cannot be saved; the message names it.
        """
        return self._flat[0].skeleton

    @property
    def outline(self) -> Outline:
        """Equal for two states whose containers have the same keys, in the same order, and the same nesting."""
        shared, own = self._flat
        return shared.order, own.order, shared.skeleton, own.skeleton

    def leaves(self, structure: Skeleton | None) -> dict[str, Any]:
        """Flat name to tensor or plain value, of all that this rank has; `structure` on the one that writes it.

        Raises:
            BadUse: something in it cannot be saved; the message names it.
        """
        shared, own = self._flat
        # In a tuple, because DCP takes dicts apart and keeps a tuple whole.
        leaves = {**shared.leaves, **own.leaves, rank_structure(self.rank): (own.skeleton,)}
        return leaves if structure is None else {**leaves, STRUCTURE: (structure,)}

    def for_dcp(self, structure: Skeleton | None) -> dict[str, Any]:
        """The same as the nested dict to hand to DCP."""
        ours: dict[str, Any] = {f"rank-{self.rank}": {**self.own, "structure": (self._flat[1].skeleton,)}}
        if structure is not None:
            ours["structure"] = (structure,)
        return {**self.shared, OWN_NAME: ours}


def collect(
    rank: int,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    per_rank: Mapping[str, Any] | None,
) -> Contents:
    """Take stock of what one rank has to save. Only the tensors' bytes may change from now on.

    Raises:
        BadUse: `state` or `per_rank` is no dict of named entries.
    """
    tensors = LiveTensors()
    if callable(state) and not has_state_dict(state):  # a module is called to train, not for its state
        state = state()
    shared = capture(state_dicts(state), tensors)  # type: ignore[arg-type] # which is checked there
    user = capture(state_dicts(per_rank or {}), tensors)
    # The generators last: a user's state_dict() may draw from them.
    own = {"user": user, "rng": rng.capture()}
    entries = (*state.values(), *(per_rank or {}).values())  # type: ignore[union-attr] # which was checked
    objects = tuple(each for each in entries if has_state_dict(each))
    return Contents(rank=rank, shared=shared, own=own, tensors=tensors, objects=objects)
