"""Which names of a module's state are judged by code of the user's, so that a fresh module is no template for them."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from holdfast.checkpoint.tree import without_wrappers

_EXTRA_STATE: Final = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def judges_all(entry: Any) -> bool:
    """Whether the `load_state_dict` of an object is neither that of PyTorch's modules nor that of its optimizers."""
    if isinstance(entry, torch.nn.Module):
        return type(entry).load_state_dict is not torch.nn.Module.load_state_dict
    if isinstance(entry, torch.optim.Optimizer):
        return type(entry).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return True


def judged_names(module: torch.nn.Module, here: Iterable[Any], saved: Iterable[Any]) -> Callable[[Any], bool]:
    """Tell whether the module's own code judges a name of its state.

    That is a name below a module that has its own `_load_from_state_dict` or a hook before loading, and an extra state
    that is there on both sides, `here` and in the `saved` names.
    """
    prefixes = tuple(
        without_wrappers(f"{path}." if path else "")
        for path, each in module.named_modules(remove_duplicate=False)
        if _has_own_loading(each)
    )
    extra = {name for name in here if _is_extra_state(name)} & {name for name in saved if _is_extra_state(name)}

    def is_judged(name: Any) -> bool:
        return name in extra or (isinstance(name, str) and without_wrappers(name).startswith(prefixes))

    return is_judged


def loads_by_itself(module: torch.nn.Module) -> bool:
    """Whether code of the user's loads some of it."""
    return any(map(_has_own_loading, module.modules()))


def _has_own_loading(module: torch.nn.Module) -> bool:
    # What PyTorch's own modules override only fills in what older versions have not saved.
    loads = type(module)._load_from_state_dict
    is_torchs = (getattr(loads, "__module__", None) or "").partition(".")[0] == "torch"
    return bool(module._load_state_dict_pre_hooks) or not is_torchs


def _is_extra_state(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA_STATE
