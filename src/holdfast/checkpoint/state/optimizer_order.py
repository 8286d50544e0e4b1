"""Match an optimizer's saved state with the parameters of a live optimizer.

The saved state identifies parameters only by numbers. Parameters are matched by name if the
checkpoint and the live optimizer both have names. The names come from the models that were saved
with the optimizer (`parameter_names`), or from `named_parameters()` passed to the optimizer
(`param_names`). If a side has no names, parameters are matched by position, as in PyTorch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Self

from holdfast.checkpoint.state.parameter_names import Names
from holdfast.checkpoint.state.tree import Skeleton, without_wrappers

Shape = tuple[int, ...]
_SHAPED_LIKE_PARAMETERS: Final = {
    *(
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
    ),
    *("exp_inf", "prev", "step_size", "sum", "ax"),
}
"""The keys of state for which `torch.optim` stores tensors in the shape of the parameter."""
_ANY_ENTRY: Final = "*"
_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """List the parameters of the saved or of the live optimizer.

    Attributes:
        groups: for each parameter group, the numbers of its parameters.
        names: the parameters' names in the models, by group, with the entry of the model; None if
            unknown.
        own_names: the names that were passed to the optimizer itself, by group; None if unknown.
    """

    groups: list[list[Any]]
    names: Names | None = None
    own_names: Names | None = None

    def renamed(self, name: Callable[[str], str | None]) -> Self:
        """Return the same parameters with other names.

        `name` maps an old name to a new one. Both begin with an entry of the state, such as
        `model.`. The optimizer's own names have no entry, so `*` is used in its place.
        """

        def own(given: str) -> str | None:
            new = name(f"{_ANY_ENTRY}.{given}")
            return new and new.removeprefix(f"{_ANY_ENTRY}.")

        return replace(self, names=_each(self.names, name), own_names=_each(self.own_names, own))


@dataclass(frozen=True, kw_only=True)
class ParameterOrder:
    """Describe which saved state belongs to which parameter of a live optimizer.

    Attributes:
        numbers: for each parameter's live number, its saved number; None if it was not saved.
        groups: for each live group, the index of the saved group; None if there is none.
        problem: the reason why the parameters could not be matched; empty if they were.
        missing: names of parameters that only the live optimizer has.
        unexpected: names of parameters that only the checkpoint has.
    """

    numbers: dict[Any, Any] = field(default_factory=dict)
    groups: list[int | None] = field(default_factory=list)
    problem: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def has_groups(state: Any) -> bool:
    """Return True if `state` is an optimizer's state with parameter groups, or its skeleton."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and "params" in group for group in groups
    )


def plain_leaves(skeleton: Mapping[Any, Any]) -> list[str]:
    """Return the flat names of the saved values that are needed to match the parameters."""
    leaves = [
        group.get(key) for group in skeleton["param_groups"] for key in ("params", "param_names")
    ]
    return [leaf for leaf in leaves if isinstance(leaf, str)]


def numbered(
    state: Mapping[Any, Any], read: Callable[[Any], Any], names: Names | None
) -> Numbered | None:
    """List the parameters of an optimizer's state or skeleton.

    Returns None if the groups do not identify each parameter by its own number.

    Args:
        state: a state for which `has_groups` is true.
        read: returns the content of a group's value; for a skeleton, the value is a flat name.
        names: the parameters' names in the models, by group; None if unknown.
    """
    groups = [read(group["params"]) for group in state["param_groups"]]
    if not all(
        isinstance(group, list) and all(isinstance(each, int | str) for each in group)
        for group in groups
    ):
        return None
    flat = list(chain(*groups))
    if len(set(flat)) < len(flat):  # a placeholder state: its numbers are not unique
        return None
    sizes = [len(group) for group in groups]
    if names is not None and [len(each) for each in names] != sizes:
        names = None
    own: Any = [
        read(group["param_names"]) if "param_names" in group else None
        for group in state["param_groups"]
    ]
    if not any(own) or any(
        not isinstance(each, list) or len(each) != len(g)
        for each, g in zip(own, groups, strict=True)
    ):
        own = None
    else:
        own = [
            [without_wrappers(name) if isinstance(name, str) else None for name in each]
            for each in own
        ]
    return Numbered(groups=groups, names=names, own_names=own)


def find_order(
    name: str, saved: Numbered, here: Numbered, *, are_same_models: bool, strict: bool = True
) -> ParameterOrder:
    """Find out which saved state belongs to which parameter of a live optimizer.

    Args:
        name: the name of the optimizer's entry.
        saved: the parameters in the checkpoint.
        here: the parameters of the live optimizer.
        are_same_models: whether names of the models prove which parameters differ. This is so if
            the models are on both sides and have no code of their own that validates names.
        strict: whether both sides must have the same parameters in the same groups.
    """
    one, other, is_certain = _names(saved, here, are_same_models=are_same_models)
    sizes, sizes_here = ([len(group) for group in each.groups] for each in (saved, here))
    flat, flat_here = list(chain(*saved.groups)), list(chain(*here.groups))
    if sizes == sizes_here and not any(a and b and a != b for a, b in zip(one, other, strict=True)):
        return _by_position(flat, flat_here, len(sizes))
    labels, labels_here = _labels(one), _labels(other)
    known, known_here = set(labels), set(labels_here)
    missing = tuple(each for each in labels_here if each not in known)
    unexpected = tuple(each for each in labels if each not in known_here)
    if is_certain and not strict:
        by_label = dict(zip(labels, flat, strict=True))
        numbers = {
            number: by_label.get(label)
            for number, label in zip(flat_here, labels_here, strict=True)
        }
        groups = _groups(numbers, saved, here, strict=False)
        return ParameterOrder(
            numbers=numbers, groups=groups or [], missing=missing, unexpected=unexpected
        )
    if len(sizes) != len(sizes_here):
        return ParameterOrder(
            problem=f"{name!r} has {len(sizes_here)} groups of parameters, the checkpoint has {len(sizes)}"
        )
    if (one and other) and not missing and not unexpected:
        by_label = dict(zip(labels, flat, strict=True))
        numbers = {
            number: by_label[label] for number, label in zip(flat_here, labels_here, strict=True)
        }
        found = _groups(numbers, saved, here, strict=True)
        if found is not None:
            return ParameterOrder(numbers=numbers, groups=found)
        return ParameterOrder(
            problem=f"{name!r} has the checkpoint's parameters in other groups ({sizes_here} against {sizes})"
        )
    if is_certain:
        lacks = f"the checkpoint has no {_some(missing)}" if missing else ""
        beyond = f"it has no {_some(unexpected)}, which the checkpoint has" if unexpected else ""
        return ParameterOrder(
            problem=f"{name!r} has other parameters: {'; '.join(filter(None, (lacks, beyond)))}"
        )
    if sizes != sizes_here:
        return ParameterOrder(
            problem=f"{name!r} has groups of {sizes_here} parameters, the checkpoint of {sizes}"
        )
    return _by_position(flat, flat_here, len(sizes))


def arranged(
    skeleton: Mapping[Any, Any], order: ParameterOrder, numbers: Collection[Any]
) -> Skeleton:
    """Rearrange the skeleton of a saved optimizer state in the order of the live optimizer.

    The keys that name and number the parameters are left out of the groups, since the live
    optimizer keeps its own. `numbers` are all numbers of parameters in the saved groups.
    """
    states = skeleton.get("state", {})
    state = {
        here: states[saved]
        for here, saved in order.numbers.items()
        if saved is not None and saved in states
    }
    # State under other keys belongs to the optimizer as a whole.
    state |= {key: value for key, value in states.items() if key not in numbers}
    saved_groups = skeleton["param_groups"]
    groups = [
        {}
        if place is None
        else {k: v for k, v in saved_groups[place].items() if k not in ("params", "param_names")}
        for place in order.groups
    ]
    return {**skeleton, "state": state, "param_groups": groups}


def misfit(
    name: str,
    states: Mapping[Any, Any],
    order: ParameterOrder,
    shapes: Mapping[Any, Shape],
    shape_of: Callable[[Any], Shape | None],
    saved_shapes: Mapping[Any, Shape],
    *,
    is_of_torch: bool,
) -> str:
    """Return why a tensor of the saved state cannot belong to its parameter; empty if all fit.

    An optimizer may store tensors of any shape. If a saved tensor had the same shape as its
    parameter when it was saved, it must have the parameter's live shape now. If the parameter's
    shape at the save is unknown, the two shapes are assumed to have been the same in two cases:

    * the saved shapes of all tensors with this key are a permutation of the parameters' live
      shapes;
    * the optimizer is one of `torch.optim`, and the key is one that it stores in the parameter's
      shape.

    Args:
        name: the name of the optimizer's entry.
        states: the skeleton of the saved state, by saved number.
        order: the match of saved and live parameters.
        shapes: the shapes of the live parameters, by number.
        shape_of: maps a flat name to the saved shape; None if the leaf is not a tensor.
        saved_shapes: the known shapes of the parameters when they were saved, by saved number.
        is_of_torch: whether the optimizer is one of `torch.optim`.
    """
    found: dict[Any, list[tuple[Any, Any, Shape]]] = {}
    for here, saved in order.numbers.items():
        state = states.get(saved) if saved is not None else None
        for key, leaf in state.items() if isinstance(state, Mapping) and here in shapes else ():
            if isinstance(leaf, str) and (shape := shape_of(leaf)) is not None:
                found.setdefault(key, []).append((here, saved, shape))
    for key, each in found.items():
        are_permuted = Counter(shape for _, _, shape in each) == Counter(
            shapes[here] for here, _, _ in each
        )
        for here, saved, shape in each:
            if saved in saved_shapes:
                is_like = shape == saved_shapes[saved] != ()
            else:
                is_like = are_permuted or (is_of_torch and key in _SHAPED_LIKE_PARAMETERS)
            if is_like and shape != shapes[here]:
                return (
                    f"{key!r} of parameter {here} of {name!r} is {list(shape)} in the checkpoint, "
                    f"and the parameter is {list(shapes[here])}"
                )
    return ""


def _names(
    saved: Numbered, here: Numbered, *, are_same_models: bool
) -> tuple[list[str | None], list[str | None], bool]:
    """Choose the names by which to compare the saved and the live parameters.

    Returns:
        The saved and the live names, by position, None where unknown; and whether a difference
        between them proves that the parameters differ.
    """
    ways = [
        (saved.names, here.names, are_same_models),
        (saved.own_names, here.own_names, True),
        (_within(saved.names), here.own_names, False),
        (saved.own_names, _within(here.names), False),
    ]
    known = [
        (_flat(one), _flat(other), is_certain) for one, other, is_certain in ways if one and other
    ]
    complete = [way for way in known if all(way[0]) and all(way[1])]
    if complete or known:
        return (complete or known)[0]
    return [], [], False


def _each(names: Names | None, change: Callable[[str], str | None]) -> Names | None:
    return names and [[name and change(name) for name in group] for group in names]


def _flat(names: Names) -> list[str | None]:
    flat = list(chain(*names))
    counts = Counter(flat)
    return [name if counts[name] == 1 else None for name in flat]


def _within(names: Names | None) -> Names | None:
    """Return the names without the entries of the state with which they begin."""
    return names and [[name and name.partition(".")[2] for name in group] for group in names]


def _labels(names: Sequence[str | None]) -> list[str]:
    """Return a label for each parameter: its name, or a numbered text if it has none."""
    count = 0
    labels = []
    for name in names:
        if name is None:
            count += 1
        labels.append(name or f"(parameter {count} without a name)")
    return labels


def _by_position(flat: list[Any], flat_here: list[Any], groups: int) -> ParameterOrder:
    return ParameterOrder(
        numbers=dict(zip(flat_here, flat, strict=True)), groups=list(range(groups))
    )


def _groups(
    numbers: Mapping[Any, Any], saved: Numbered, here: Numbered, *, strict: bool
) -> list[int | None] | None:
    """Return, for each live group, the saved group that has the same parameters.

    If not `strict`, a saved group that has the first known parameter of the live group is enough.
    Returns None if `strict` and some group has no match.
    """
    group_of = {number: place for place, group in enumerate(saved.groups) for number in group}
    empty = [place for place, group in enumerate(saved.groups) if not group]
    found: list[int | None] = []
    for group in here.groups:
        places = list(
            dict.fromkeys(
                group_of[numbers[number]] for number in group if numbers[number] is not None
            )
        )
        if not group and empty:
            found.append(empty.pop(0))
        elif places and (
            not strict or (len(places) == 1 and len(saved.groups[places[0]]) == len(group))
        ):
            found.append(places[0])
        elif strict:
            return None
        else:
            found.append(None)
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
