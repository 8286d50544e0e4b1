"""Find the names of an optimizer's parameters, which its state identifies only by numbers."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state.tree import PLAIN_TENSORS, without_wrappers

Names = list[list[str | None]]
"""The names by group and position; None for a parameter that no entry of the state has."""
Parts = tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
"""`state` and `per_rank`; each as the user passed it, and with the results of `state_dict()`."""


class ParameterNames:
    """Find the parameter names of optimizers, and cache them until the optimizers change."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._seen: list[Any] = []
        self._found: tuple[dict[str, Names], ...] = ()

    def of(
        self, *parts: tuple[Mapping[str, Any], Mapping[str, Any]]
    ) -> tuple[dict[str, Names], ...]:
        """Return, for each of `parts`, the names of each optimizer's parameters.

        As long as the optimizers do not change, the same objects are returned.
        """
        # Python reuses the ids of dead objects, so the entries are compared by weak references,
        # too.
        seen = [
            (
                list(entries),
                name,
                weakref.ref(entry),
                [list(map(id, group["params"])) for group in entry.param_groups],
            )
            for entries, _ in parts
            for name, entry in entries.items()
            if isinstance(entry, torch.optim.Optimizer)
        ]
        if seen != self._seen or not self._found:
            self._seen, self._found = seen, parameter_names(*parts)
        return self._found


def parameter_names(
    *parts: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> tuple[dict[str, Names], ...]:
    """Find the parameter names of each optimizer, in the form ENTRY.NAME.

    ENTRY is the model's entry in the state, and NAME is the parameter's name there. Name parts of
    wrappers such as FSDP are removed. If a parameter has several names, as tied weights do, the
    alphabetically first one is used. An optimizer of which no parameter has a name is left out.
    """
    optimizers = [
        {name: entry for name, entry in entries.items() if isinstance(entry, torch.optim.Optimizer)}
        for entries, _ in parts
    ]
    if not any(optimizers):
        return tuple({} for _ in parts)
    known: dict[Any, str] = {}
    for key, name in _named(parts):
        name = without_wrappers(name)  # noqa: PLW2901 - the same name
        known[key] = min(known.get(key, name), name)

    def name_of(parameter: Any) -> str | None:
        return known.get(id(parameter)) or known.get(_place(parameter))

    def names_of(optimizer: torch.optim.Optimizer) -> Names:
        return [
            [name_of(parameter) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]

    found = [{name: names_of(entry) for name, entry in each.items()} for each in optimizers]
    return tuple(
        {name: names for name, names in each.items() if any(map(any, names))} for each in found
    )


def _named(parts: Parts) -> Iterator[tuple[Any, str]]:
    for entries, states in parts:
        for name, entry in entries.items():
            if isinstance(entry, torch.nn.Module):
                for path, parameter in entry.named_parameters(remove_duplicate=False):
                    yield id(parameter), f"{name}.{path}"
            elif not isinstance(entry, torch.optim.Optimizer):
                yield from _tensors(name, states[name])


def _tensors(name: str, value: Any) -> Iterator[tuple[Any, str]]:
    """Yield the memory location and the name of each tensor in a state dict."""
    if isinstance(value, torch.Tensor):
        if (place := _place(value)) is not None:
            yield place, name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def _place(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory location; None if several tensors may have this location.

    For example, a tensor that wraps other tensors has no location of its own.
    """
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if (
        type(own) not in PLAIN_TENSORS
        or own.layout is not torch.strided
        or not own.numel()
        or not own.data_ptr()
    ):
        return None
    return own.device, own.data_ptr(), own.dtype, own.size(), own.stride()
