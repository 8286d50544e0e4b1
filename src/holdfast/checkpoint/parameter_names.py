"""The names of the parameters that the numbers in an optimizer's state stand for, as the models beside it have them."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.checkpoint.tree import without_wrappers

Names = list[list[str | None]]
"""By group and place; None where no entry of the state has that parameter."""
Parts = tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
"""Of the state and of `per_rank`: the entries as the user gives them, and the same with their `state_dict()`s."""


class ParameterNames:
    """Those of the optimizers of a state that is saved again and again, looked up when the optimizers change."""

    def __init__(self) -> None:
        """Nothing is looked up yet."""
        self._seen: list[Any] = []
        self._found: tuple[dict[str, Names], ...] = ()

    def of(self, *parts: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[dict[str, Names], ...]:
        """For each of `parts`, the names of each optimizer's parameters; the same objects while nothing changes."""
        # Numbers of objects that have died are given again, so the optimizers themselves are compared as well.
        seen = [
            (list(entries), name, weakref.ref(entry), [list(map(id, group["params"])) for group in entry.param_groups])
            for entries, _ in parts
            for name, entry in entries.items()
            if isinstance(entry, torch.optim.Optimizer)
        ]
        if seen != self._seen or not self._found:
            self._seen, self._found = seen, parameter_names(*parts)
        return self._found


def parameter_names(*parts: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[dict[str, Names], ...]:
    """Find the names of the parameters of each optimizer: ENTRY.NAME, without what wrappers add.

    Of several names, as tied weights have, it is the first in the order of text. An optimizer without any is left out.
    """
    optimizers = [
        {name: entry for name, entry in entries.items() if isinstance(entry, torch.optim.Optimizer)}
        for entries, _ in parts
    ]
    if not any(optimizers):
        return tuple({} for _ in parts)
    known: dict[Any, str] = {}
    for key, name in _named(parts):
        name = without_wrappers(name)  # noqa: PLW2901 - it is the same
        known[key] = min(known.get(key, name), name)

    def name_of(parameter: Any) -> str | None:
        return known.get(id(parameter)) or known.get(_place(parameter))

    def names_of(optimizer: torch.optim.Optimizer) -> Names:
        return [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]

    found = [{name: names_of(entry) for name, entry in each.items()} for each in optimizers]
    return tuple({name: names for name, names in each.items() if any(map(any, names))} for each in found)


def _named(parts: Parts) -> Iterator[tuple[Any, str]]:
    for entries, states in parts:
        for name, entry in entries.items():
            if isinstance(entry, torch.nn.Module):
                for path, parameter in entry.named_parameters(remove_duplicate=False):
                    yield id(parameter), f"{name}.{path}"
            elif not isinstance(entry, torch.optim.Optimizer):
                yield from _tensors(name, states[name])


def _tensors(name: str, value: Any) -> Iterator[tuple[Any, str]]:
    """A state dict has tensors that share the memory of the parameters."""
    if isinstance(value, torch.Tensor):
        if (place := _place(value)) is not None:
            yield place, name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def _place(tensor: torch.Tensor) -> Any:
    """Where it lies; None where that tells nothing."""
    own = getattr(tensor, "_local_tensor", tensor)
    if own.is_meta or own.layout is not torch.strided or not own.numel() or not own.data_ptr():
        return None
    return own.device, own.data_ptr(), own.dtype, own.size(), own.stride()
