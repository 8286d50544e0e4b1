"""Collect the entries that one rank saves: the user's `state`, and entries of this rank only.

A skeleton is the nesting of a state without its tensors and values (see `tree`). Holdfast's own
entries are stored beside the user's entries, under the name `holdfast`:

| flat name | content |
|---|---|
| `holdfast.structure` | the skeleton of `state`, merged from all ranks |
| `holdfast.optimizers` | the parameter names of the optimizers in `state`, see `parameter_names` |
| `holdfast.rank-N.structure` | the skeleton of the entries of rank N only |
| `holdfast.rank-N.optimizers` | the parameter names of the optimizers in `per_rank` of rank N |
| `holdfast.rank-N.user.…` | `per_rank` of rank N |
| `holdfast.rank-N.rng.…` | the random generators of rank N |

The rank in the name keeps DCP from merging entries that differ between ranks.
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
    """Return the flat name under which the skeleton of the rank's own entries is stored."""
    return f"{OWN_NAME}.rank-{rank}.structure"


def rank_optimizers(rank: int) -> str:
    """Return the flat name for the parameter names of the optimizers in the rank's `per_rank`."""
    return f"{OWN_NAME}.rank-{rank}.optimizers"


def has_state_dict(value: Any) -> bool:
    """Return True if `value` has the methods `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def check_named(state: Any) -> None:
    """Check that `state` is a dict whose keys are strings.

    Raises:
        BadUse: `state` is not such a dict, or uses the reserved name `holdfast`.
    """
    if not isinstance(state, Mapping):
        raise BadUse(
            f"The state must be a dict of named entries, not a {type(state).__name__}. Give "
            f"{{'model': model, …}}."
        )
    for name in state:
        if not isinstance(name, str):
            raise BadUse(f"The state has an entry {name!r}. Names of entries are text.")
        if name.split(".")[0] == OWN_NAME:
            raise BadUse(
                f"The state has an entry {name!r}. Use a name that does not begin with "
                f"'{OWN_NAME}'."
            )


def state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each object that has a `state_dict` replaced by its `state_dict()`.

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
    """Hold the entries that one rank saves.

    Attributes:
        rank: the number of the rank.
        shared: the user's `state`.
        own: the entries of this rank only, with the keys `user` (the user's `per_rank`) and `rng`.
        tensors: the live tensors of `shared` and `own`, in order.
        names: the parameter names of the optimizers in `shared`.
        own_names: the parameter names of the optimizers in `own`.
        objects: the user's entries that have a `state_dict` method.
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
        """Return the nesting of the user's `state` on this rank, without its tensors and values.

        Raises:
            BadUse: a value cannot be saved; the message names it.
        """
        return self._flat[0].skeleton

    @property
    def outline(self) -> Outline:
        """Return a value that is equal for two states with the same structure.

        Two states have the same structure if their containers have the same keys in the same order
        and the same nesting, and their optimizers' parameters have the same names.
        """
        shared, own = self._flat
        return shared.order, own.order, shared.skeleton, own.skeleton, (self.names, self.own_names)

    def leaves(self, structure: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return all tensors and plain values of this rank, by flat name.

        Args:
            structure: the result of `structures` on the rank that writes the structure; None on
                others.

        Raises:
            BadUse: a value cannot be saved; the message names it.
        """
        shared, own = self._flat
        return {**shared.leaves, **own.leaves, **self._of_rank(), **(structure or {})}

    def for_dcp(self, structure: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the entries of `leaves` as the nested dict that DCP expects."""
        rank = f"{OWN_NAME}.rank-{self.rank}."
        described = {name.removeprefix(rank): value for name, value in self._of_rank().items()}
        ours: dict[str, Any] = {f"rank-{self.rank}": {**self.own, **described}}
        ours |= {
            name.removeprefix(f"{OWN_NAME}."): value for name, value in (structure or {}).items()
        }
        return {**self.shared, OWN_NAME: ours}

    @functools.cached_property
    def described(self) -> frozenset[str]:
        """Return the flat names of the entries that describe this rank's own entries."""
        return frozenset(self._of_rank())

    def _of_rank(self) -> dict[str, Any]:
        return _described(
            self._flat[1].skeleton,
            self.own_names,
            rank_structure(self.rank),
            rank_optimizers(self.rank),
        )


def structures(skeleton: Skeleton, names: dict[str, Names]) -> dict[str, Any]:
    """Return the entries that describe `state`, by flat name: its skeleton and parameter names."""
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
    """Collect the entries that one rank saves.

    Containers and plain values are copied, so the result changes only if the bytes of its tensors
    change.

    Args:
        rank: the number of this rank.
        state: see `Checkpointer.save`.
        per_rank: see `Checkpointer.save`.
        named: the cache of parameter names that earlier saves have filled.

    Raises:
        BadUse: `state` or `per_rank` is not a dict whose keys are strings.
    """
    tensors = LiveTensors()
    # A module is callable too, but its `state_dict` gives its state.
    if callable(state) and not has_state_dict(state):
        state = state()
    # `state_dicts` checks the types.
    shared_states, own_states = state_dicts(state), state_dicts(per_rank or {})  # type: ignore[arg-type]
    names, own_names = (named or ParameterNames()).of(
        (state, shared_states),  # type: ignore[arg-type]
        (per_rank or {}, own_states),
    )
    shared = capture(shared_states, tensors)
    user = capture(own_states, tensors)
    # Capture the generators last: a user's state_dict() may draw random numbers.
    entries = (*state.values(), *(per_rank or {}).values())  # type: ignore[union-attr]
    return Contents(
        rank=rank,
        shared=shared,
        own={"user": user, "rng": random_state.capture()},
        tensors=tensors,
        names=names,
        own_names=own_names,
        objects=tuple(each for each in entries if has_state_dict(each)),
    )
