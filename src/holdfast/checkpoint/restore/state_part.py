"""Restore the user's entries of `state` or `per_rank` from a checkpoint."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state.capture import has_state_dict, state_dicts
from holdfast.checkpoint.state.compatibility import ABSENT, Fit, fill, rebuilt
from holdfast.checkpoint.state.optimizer_order import (
    Numbered,
    arranged,
    find_order,
    has_groups,
    misfit,
    numbered,
    plain_leaves,
)
from holdfast.checkpoint.state.parameter_names import Names
from holdfast.checkpoint.state.tree import irregular, without_wrappers
from holdfast.core.errors import HoldfastError, StateMismatch

_NUMBERING = ("params", "param_names")


class StatePart:
    """Hold the entries of `state` or of `per_rank` during a restore.

    Attributes:
        entries: the entries as the user passed them.
        targets: the same entries, with each object replaced by its `state_dict()`.
        described: the flat name under which the checkpoint has the parameter names of the
            optimizers.
    """

    def __init__(
        self,
        entries: MutableMapping[str, Any],
        skeleton: Mapping[Any, Any],
        described: str,
        *,
        lost_empty: bool = False,
    ) -> None:
        """Collect the live state of the entries by calling `state_dict()` of each object.

        Args:
            entries: see `StatePart`.
            skeleton: the skeleton of these entries in the checkpoint.
            described: see `StatePart`.
            lost_empty: whether the checkpoint omits empty dicts.
        """
        self.entries = entries
        self.targets = state_dicts(entries)
        self.described = described
        self._skeleton = dict(skeleton)
        self._lost_empty = lost_empty
        self._own = {name: self._judged(name) for name in self.targets}
        self._optimizers = [
            name
            for name, target in self.targets.items()
            if has_groups(target)
            and has_groups(self._skeleton.get(name))
            and (
                isinstance(entries[name], torch.optim.Optimizer)
                or not has_state_dict(entries[name])
            )
        ]
        self._rearranged: set[str] = set()

    def plain_leaves(self) -> list[str]:
        """Return the flat names of the plain values that `arrange` needs from the checkpoint."""
        leaves = [leaf for name in self._optimizers for leaf in plain_leaves(self._skeleton[name])]
        return [*leaves, self.described] if leaves else []

    def arrange(
        self,
        fit: Fit,
        known: Mapping[str, Any],
        names: Mapping[str, Names],
        renamed: Callable[[str], str | None] = str,
    ) -> None:
        """Rearrange the saved state of each optimizer in the order of the live parameters.

        Args:
            fit: the comparison that records each difference.
            known: the saved values for the names of `plain_leaves`, as far as the checkpoint has
                them.
            names: the parameter names of each optimizer of the live state.
            renamed: returns the name in the live state for a saved parameter name; both include the
                entry.
        """
        described = known.get(self.described)
        saved_names = described[0] if isinstance(described, tuple) and described else {}
        for name in self._optimizers:
            skeleton, target = self._skeleton[name], self.targets[name]
            found = _names(saved_names.get(name) if isinstance(saved_names, dict) else None)
            saved = numbered(
                skeleton, lambda leaf: known.get(leaf) if isinstance(leaf, str) else None, found
            )
            saved = saved and saved.renamed(renamed)
            here = numbered(target, lambda value: value, names.get(name))
            if saved is None or here is None:
                continue
            entry = self.entries[name]
            if isinstance(entry, torch.optim.Optimizer) and self._own[name] is not _all:
                self._arrange(fit, name, entry, saved, here)
            else:
                self._rearrange(name, saved, here)

    def look(self, fit: Fit) -> None:
        """Compare the entries with the checkpoint, as far as Holdfast can judge them.

        An object with its own `load_state_dict` may accept other names and shapes. Its part of the
        state is left out of the comparison.
        """
        for name, own in self._own.items():
            if name not in self._skeleton:
                fit.require(name, self.targets[name])
                continue
            if own is _all:
                continue
            skeleton, problems = self._skeleton[name], len(fit.problems)
            taken: Any = fit.fit(
                name,
                _without(own, self._compared(name)),
                _without(own, skeleton),
                adds=name in self._optimizers,
            )
            if len(fit.problems) == problems:
                fit.problems += _refused(name, self.entries[name], self.targets[name], taken)
            self._skeleton[name] = taken if own is _nothing else {**taken, **_within(own, skeleton)}

    def adopt(self, fit: Fit) -> None:
        """Record as wanted all entries that `look` left out, exactly as saved.

        Call this method after `look` of all parts.
        """
        for name, own in self._own.items():
            target, skeleton = self.targets[name], self._skeleton.get(name, {})
            if own is _all:
                fit.adopt(name, target, skeleton)
            elif own is not _nothing:
                for key, part in _within(own, skeleton).items():
                    fit.adopt(f"{name}.{key}", target.get(key, ABSENT), part)

    def put(self, fit: Fit, loaded: Mapping[str, Any]) -> None:
        """Put the values that were read from the checkpoint into the user's entries.

        `fit` records as `missing` and `unexpected` the names that a module's own `load_state_dict`
        reports as such.

        Raises:
            StateMismatch: the `load_state_dict` of an object raised an error.
        """
        seen: set[int] = set()
        for name, entry in self.entries.items():
            if name in self._skeleton:
                self._put(fit, name, entry, self._filled(name, loaded, seen))

    def _put(self, fit: Fit, name: str, entry: Any, filled: Any) -> None:
        if not has_state_dict(entry):
            self.entries[name] = filled
            return
        try:
            if fit.strict or self._own[name] is _all or not isinstance(entry, torch.nn.Module):
                entry.load_state_dict(filled)
            else:
                left_out = entry.load_state_dict(filled, strict=False)
                fit.missing += (f"{name}.{key}" for key in left_out.missing_keys)
                fit.unexpected += (f"{name}.{key}" for key in left_out.unexpected_keys)
        except HoldfastError:
            raise
        except Exception as error:  # an error of the user's code
            reason = next(iter(str(error).strip().splitlines()), "")
            raise StateMismatch(
                f"load_state_dict of {name!r} failed ({type(error).__name__}: {reason}). Some tensors "
                "are restored already. Build the object as it was saved, or leave the entry "
                "out."
            ) from error

    def _filled(self, name: str, loaded: Mapping[str, Any], seen: set[int]) -> Any:
        target, skeleton, own = self.targets[name], self._skeleton[name], self._own[name]
        if own is _nothing:
            return fill(target, skeleton, loaded, seen)
        if own is not _all:
            filled = fill(target, _without(own, skeleton), loaded, seen)
            for key in _within(own, filled):
                del filled[key]
            for key, part in _within(own, skeleton).items():
                filled[key] = rebuilt(target.get(key, ABSENT), part, loaded)
            return filled
        filled = rebuilt(target, skeleton, loaded, lost_empty=self._lost_empty)
        if name in self._rearranged:
            for group, here in zip(filled["param_groups"], target["param_groups"], strict=True):
                group.update({key: here[key] for key in _NUMBERING if key in here})
        return filled

    def _arrange(
        self, fit: Fit, name: str, entry: torch.optim.Optimizer, saved: Numbered, here: Numbered
    ) -> None:
        """Rearrange the state of an optimizer whose `load_state_dict` is PyTorch's."""
        skeleton = self._skeleton[name]
        order = find_order(
            name, saved, here, are_same_models=self._are_same_models(saved, here), strict=fit.strict
        )
        problem = order.problem
        if not problem:
            problem = misfit(
                name,
                skeleton.get("state", {}),
                order,
                _shapes(entry, here),
                fit.saved_shape,
                _saved_shapes(fit, saved),
                is_of_torch=type(entry).__module__.startswith("torch.optim."),
            )
        if problem:
            fit.problems.append(problem)
            return
        fit.missing += (f"{name}: {each}" for each in order.missing)
        fit.unexpected += (f"{name}: {each}" for each in order.unexpected)
        self._rearranged.add(name)
        self._skeleton[name] = arranged(
            skeleton, order, {number for group in saved.groups for number in group}
        )

    def _rearrange(self, name: str, saved: Numbered, here: Numbered) -> None:
        """Rearrange optimizer state that is a plain dict, or that has its own `load_state_dict`.

        The optimizer's own code may interpret the state in any way. So the state is rearranged only
        if the checkpoint and the live optimizer have the same parameters in another order.
        """
        order = find_order(name, saved, here, are_same_models=False)
        numbers = [number for group in saved.groups for number in group]
        if not order.problem and [*order.numbers.values()] != numbers:
            self._rearranged.add(name)
            self._skeleton[name] = arranged(self._skeleton[name], order, set(numbers))

    def _compared(self, name: str) -> Any:
        """Return an entry's live state without the parts that need not be in the checkpoint."""
        target = self.targets[name]
        if name not in self._rearranged:
            return target
        # A checkpoint may lack two kinds of group keys, which the optimizer then keeps: options
        # that a newer PyTorch has added, and the keys that number parameters.
        is_optimizer = isinstance(self.entries[name], torch.optim.Optimizer)
        groups = [
            {
                key: value
                for key, value in group.items()
                if key in saved or not (is_optimizer or key in _NUMBERING)
            }
            for group, saved in zip(
                target["param_groups"], self._skeleton[name]["param_groups"], strict=True
            )
        ]
        return {**target, "param_groups": groups}

    def _judged(self, name: str) -> Callable[[Any], bool]:
        """Return a function that tests if an object's own loading code validates a key."""
        entry, target, skeleton = self.entries[name], self.targets[name], self._skeleton.get(name)
        if not has_state_dict(entry):
            return _nothing
        if judges_all(entry):
            return _all
        if (
            isinstance(entry, torch.nn.Module)
            and isinstance(target, dict)
            and isinstance(skeleton, dict)
        ):
            return judged_names(entry, target, skeleton)
        return _nothing

    def _are_same_models(self, saved: Numbered, here: Numbered) -> bool:
        """Return True if all parameter names belong to entries that Holdfast can compare.

        Such an entry is in the state and in the checkpoint, and has no loading code of its own that
        validates names.
        """
        entries = [
            name
            for name, entry in self.entries.items()
            if name in self._skeleton
            and self._own[name] is not _all
            and not (isinstance(entry, torch.nn.Module) and loads_by_itself(entry))
        ]
        known = tuple(f"{name}." for name in entries)
        names = (
            name for each in (saved, here) for group in each.names or () for name in group if name
        )
        return all(name.startswith(known) or name in entries for name in names)


def _names(value: Any) -> Names | None:
    """Return the parameter names stored in a checkpoint; None if they are malformed."""
    try:
        return [
            [None if name is None else without_wrappers(name) for name in group] for group in value
        ]
    except TypeError:
        return None


def _shapes(optimizer: torch.optim.Optimizer, here: Numbered) -> dict[Any, tuple[int, ...]]:
    """Return the shapes of a live optimizer's parameters, by number."""
    if [len(group["params"]) for group in optimizer.param_groups] != [
        len(group) for group in here.groups
    ]:
        return {}
    return {
        number: tuple(parameter.size())
        for numbers, group in zip(here.groups, optimizer.param_groups, strict=True)
        for number, parameter in zip(numbers, group["params"], strict=True)
        if irregular(parameter) is None
    }


def _saved_shapes(fit: Fit, saved: Numbered) -> dict[Any, tuple[int, ...]]:
    """Return the saved shapes of an optimizer's parameters, by number, where they are known.

    A shape is known if the model was saved beside the optimizer.
    """
    found = {}
    for numbers, names in zip(saved.groups, saved.names or (), strict=False):
        for number, name in zip(numbers, names, strict=True):
            if name is not None and (shape := fit.saved_shape_of(name)) is not None:
                found[number] = shape
    return found


def _without(own: Callable[[Any], bool], entries: Any) -> Any:
    return (
        entries if own is _nothing else {key: part for key, part in entries.items() if not own(key)}
    )


def _within(own: Callable[[Any], bool], entries: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: part for key, part in entries.items() if own(key)}


def _all(_key: Any) -> bool:
    return True


def _nothing(_key: Any) -> bool:
    return False


def _refused(name: str, entry: Any, target: Any, skeleton: Any) -> list[str]:
    """Return the reasons why `load_state_dict` of `entry` would reject a checkpoint.

    `target` is the live state of `entry`. Keys of `target` that the checkpoint lacks are reported
    elsewhere.
    """
    if not isinstance(skeleton, dict) or not isinstance(target, Mapping):
        return []
    if isinstance(entry, torch.nn.Module):
        return [
            f"{name!r} has no {key!r}, which the checkpoint has"
            for key in skeleton
            if key not in target
        ]
    is_fresh = (
        isinstance(entry, torch.optim.Optimizer) and not entry.state and skeleton.get("state")
    )
    if is_fresh and any(map(_is_sharded, entry.param_groups)):
        return [
            (
                f"{name!r} has no state yet and sharded parameters: save and restore it in a "
                "ShardedOptimizer"
            )
        ]
    return []


def _is_sharded(group: Mapping[str, Any]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in group["params"])


# A module's own loading code may accept names that a newly built module does not have. So for such
# names, the live state cannot show which ones the checkpoint should have.

_EXTRA_STATE: Final = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def judges_all(entry: Any) -> bool:
    """Return True if an object does not use `load_state_dict` of PyTorch's classes.

    PyTorch's classes are modules and optimizers.
    """
    if isinstance(entry, torch.nn.Module):
        return type(entry).load_state_dict is not torch.nn.Module.load_state_dict
    if isinstance(entry, torch.optim.Optimizer):
        return type(entry).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return True


def judged_names(
    module: torch.nn.Module, here: Iterable[Any], saved: Iterable[Any]
) -> Callable[[Any], bool]:
    """Return a function that is True for the names that a module's own loading code validates.

    These are names below a submodule with its own `_load_from_state_dict` or with a pre-hook for
    loading, and names of extra state that are both in `here`, the live state, and in `saved`.
    """
    prefixes = tuple(
        without_wrappers(f"{path}." if path else "")
        for path, each in module.named_modules(remove_duplicate=False)
        if _has_own_loading(each)
    )
    extra = {name for name in here if _is_extra_state(name)} & {
        name for name in saved if _is_extra_state(name)
    }

    def is_judged(name: Any) -> bool:
        return name in extra or (
            isinstance(name, str) and without_wrappers(name).startswith(prefixes)
        )

    return is_judged


def loads_by_itself(module: torch.nn.Module) -> bool:
    """Return True if `module` or a submodule has loading code other than PyTorch's."""
    return any(map(_has_own_loading, module.modules()))


def _has_own_loading(module: torch.nn.Module) -> bool:
    # PyTorch's own overrides only fill in values that older versions have not saved.
    loads = type(module)._load_from_state_dict
    is_torchs = (getattr(loads, "__module__", None) or "").partition(".")[0] == "torch"
    return bool(module._load_state_dict_pre_hooks) or not is_torchs


def _is_extra_state(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA_STATE
