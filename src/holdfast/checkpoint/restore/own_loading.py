"""Find the names of a module's state that the user's code judges, so that a fresh module is no template for them."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from holdfast.checkpoint.state.tree import without_wrappers

_EXTRA_STATE: Final = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def judges_all(entry: Any) -> bool:
    """Return whether an object has a `load_state_dict` other than the ones of PyTorch's modules and optimizers."""
    if isinstance(entry, torch.nn.Module):
        return type(entry).load_state_dict is not torch.nn.Module.load_state_dict
    if isinstance(entry, torch.optim.Optimizer):
        return type(entry).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return True


def judged_names(
    module: torch.nn.Module, here: Iterable[Any], saved: Iterable[Any]
) -> Callable[[Any], bool]:
    """Return a function that tests whether the module's own code judges a name of its state.

    The module's own code judges names below a module that has its own `_load_from_state_dict` or a hook before loading.
    The module's own code also judges an extra state that is there on both sides, `here` and in the `saved` names.
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
    """Return whether the user's code loads some of the state of `module`."""
    return any(map(_has_own_loading, module.modules()))


def _has_own_loading(module: torch.nn.Module) -> bool:
    # The overrides of PyTorch's own modules only fill in values that older versions have not saved.
    loads = type(module)._load_from_state_dict
    is_torchs = (getattr(loads, "__module__", None) or "").partition(".")[0] == "torch"
    return bool(module._load_state_dict_pre_hooks) or not is_torchs


def _is_extra_state(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA_STATE
