"""What one rank puts into a checkpoint: its part of the user's state, and what is its own.

Under the name `holdfast`, beside the user's entries:

| flat name | what |
|---|---|
| `holdfast.structure` | the skeleton of the shared state, of all ranks together |
| `holdfast.optimizers` | of each optimizer in it the names of its parameters, see `parameter_names` |
| `holdfast.rank-N.structure` | the skeleton of what follows |
| `holdfast.rank-N.optimizers` | as above, of those in `per_rank` |
| `holdfast.rank-N.user.…` | `per_rank` of rank N |
| `holdfast.rank-N.rng.…` | the random generators of rank N |

The rank in the name keeps DCP from merging what differs by rank.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.state import random_state
from holdfast.checkpoint.state.parameter_names import Names, ParameterNames
from holdfast.checkpoint.state.tree import FlatState, LiveTensors, Skeleton, capture, flatten
from holdfast.core.errors import BadUse

Outline = tuple[list[str], list[str], Skeleton, Skeleton, Any]
OWN_NAME = "holdfast"
STRUCTURE = f"{OWN_NAME}.structure"
OPTIMIZERS = f"{OWN_NAME}.optimizers"


def rank_structure(rank: int) -> str:
    """The flat name of the skeleton of what belongs to `rank`."""
    return f"{OWN_NAME}.rank-{rank}.structure"


def rank_optimizers(rank: int) -> str:
    """The flat name of the names of the parameters of what belongs to `rank`."""
    return f"{OWN_NAME}.rank-{rank}.optimizers"


def has_state_dict(value: Any) -> bool:
    """Whether `value` is an object that gives its state and takes it back, as modules and optimizers do."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


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
            raise BadUse(
                f"The state has an entry {name!r}. Use a name that does not begin with '{OWN_NAME}'."
            )


def state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with each such object replaced by its `state_dict()`.

    Raises:
        BadUse: see `check_named`.
    """
    check_named(state)
    return {
        name: value.state_dict() if has_state_dict(value) else value
        for name, value in state.items()
    }


@dataclass(frozen=True, kw_only=True)
class Contents:
    """`shared`: the user's state. `own`: what belongs to `rank`. `tensors`: those of both, live, as they come.

    `names`, `own_names`: of the optimizers in them, the names of their parameters. `objects`: the entries of both that
    gave their state themselves.
    """

    rank: int
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: LiveTensors
    names: dict[str, Names]
    own_names: dict[str, Names]
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
        """Equal for two states whose containers have the same keys, in the same order, and the same nesting.

        The parameters of their optimizers have the same names, too.
        """
        shared, own = self._flat
        return shared.order, own.order, shared.skeleton, own.skeleton, (self.names, self.own_names)

    def leaves(self, structure: Mapping[str, Any] | None) -> dict[str, Any]:
        """Flat name to tensor or plain value, of all that this rank has.

        Args:
            structure: what `structures` makes of all ranks' states, on the rank that writes it.

        Raises:
            BadUse: something in it cannot be saved; the message names it.
        """
        shared, own = self._flat
        return {**shared.leaves, **own.leaves, **self._of_rank(), **(structure or {})}

    def for_dcp(self, structure: Mapping[str, Any] | None) -> dict[str, Any]:
        """The same as the nested dict to hand to DCP."""
        rank = f"{OWN_NAME}.rank-{self.rank}."
        described = {name.removeprefix(rank): value for name, value in self._of_rank().items()}
        ours: dict[str, Any] = {f"rank-{self.rank}": {**self.own, **described}}
        ours |= {
            name.removeprefix(f"{OWN_NAME}."): value for name, value in (structure or {}).items()
        }
        return {**self.shared, OWN_NAME: ours}

    @functools.cached_property
    def described(self) -> frozenset[str]:
        """The flat names of what describes this rank's own part."""
        return frozenset(self._of_rank())

    def _of_rank(self) -> dict[str, Any]:
        return _described(
            self._flat[1].skeleton,
            self.own_names,
            rank_structure(self.rank),
            rank_optimizers(self.rank),
        )


def structures(skeleton: Skeleton, names: dict[str, Names]) -> dict[str, Any]:
    """What describes the state of all ranks together, by flat name."""
    return _described(skeleton, names, STRUCTURE, OPTIMIZERS)


def _described(
    skeleton: Skeleton, names: dict[str, Names], structure: str, optimizers: str
) -> dict[str, Any]:
    # In a tuple, because DCP takes dicts apart and keeps a tuple whole.
    return {structure: (skeleton,), **({optimizers: (names,)} if names else {})}


def collect(
    rank: int,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    per_rank: Mapping[str, Any] | None,
    named: ParameterNames | None = None,
) -> Contents:
    """Take stock of what one rank has to save. Only the tensors' bytes may change from now on.

    Args:
        rank: this one.
        state: see `Checkpointer.save`.
        per_rank: likewise.
        named: what was looked up for the saves before this one.

    Raises:
        BadUse: `state` or `per_rank` is no dict of named entries.
    """
    tensors = LiveTensors()
    if callable(state) and not has_state_dict(
        state
    ):  # a module is called to train, not for its state
        state = state()
    shared_states, own_states = state_dicts(state), state_dicts(per_rank or {})  # type: ignore[arg-type] # checked there
    names, own_names = (named or ParameterNames()).of(
        (state, shared_states),  # type: ignore[arg-type]
        (per_rank or {}, own_states),
    )
    shared = capture(shared_states, tensors)
    user = capture(own_states, tensors)
    # The generators last: a user's state_dict() may draw from them.
    entries = (*state.values(), *(per_rank or {}).values())  # type: ignore[union-attr] # which was checked
    return Contents(
        rank=rank,
        shared=shared,
        own={"user": user, "rng": random_state.capture()},
        tensors=tensors,
        names=names,
        own_names=own_names,
        objects=tuple(each for each in entries if has_state_dict(each)),
    )
