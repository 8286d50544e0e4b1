"""Hook modules so that a pickle, a copy and a script of a hooked module hold no hook.

A script may save its whole model (`torch.save(model)`), and the model must load where Holdfast is
not installed. TorchScript compiles the hooks of a module, and refuses those that it cannot compile.
"""

import contextlib
import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

TABLES: Final = ("_forward_hooks", "_forward_pre_hooks")
"""The attributes of a module that hold its forward hooks."""


class ModuleHook:
    """A forward hook of a module."""

    def __init__(self, call: Callable[..., None]) -> None:
        """Wrap a function with the arguments of a forward hook or of a forward pre-hook."""
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # For a class that pickles its hooks by itself, as torch.fx.GraphModule: a function that
        # does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def outermost_modules() -> "list[nn.Module]":
    """Return the modules of this process that are part of no other module."""
    torch: Any = sys.modules["torch"]
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    return [one for one in modules if id(one) not in inner]


def keep_hooks_out() -> Callable[[], None]:
    """Leave each `ModuleHook` out of pickles, copies and scripts of modules.

    Returns:
        what ends this.
    """
    removals = [_keep_out_of_pickles(), _keep_out_of_scripts()]

    def end() -> None:
        for removal in removals:
            removal()

    return end


def _keep_out_of_pickles() -> Callable[[], None]:
    module_class: Any = sys.modules["torch"].nn.Module
    original = module_class.__reduce_ex__

    @functools.wraps(original)
    def reduce(self: "nn.Module", protocol: int) -> Any:
        reduced = original(self, protocol)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            return (*reduced[:2], _without_hooks(reduced[2]), *reduced[3:])
        return reduced

    was_own = "__reduce_ex__" in vars(module_class)
    module_class.__reduce_ex__ = reduce

    def restore() -> None:
        if vars(module_class).get("__reduce_ex__") is not reduce:
            return  # another one has wrapped it since
        if was_own:
            module_class.__reduce_ex__ = original
        else:
            del module_class.__reduce_ex__

    return restore


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    hooked = {
        name: OrderedDict(item for item in table.items() if not isinstance(item[1], ModuleHook))
        for name in TABLES
        if _has_hook(table := state.get(name, {}))
    }
    return state | hooked if hooked else state


def _has_hook(table: Any) -> bool:
    return bool(table) and any(isinstance(hook, ModuleHook) for hook in table.values())


def _keep_out_of_scripts() -> Callable[[], None]:
    # PyTorch has no public function that all ways to a script go through.
    recursive: Any = sys.modules.get("torch.jit._recursive")
    original = getattr(recursive, "create_script_module", None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def create(nn_module: "nn.Module", *args: Any, **kwargs: Any) -> Any:
        with _taken_off(nn_module):
            return original(nn_module, *args, **kwargs)

    recursive.create_script_module = create

    def restore() -> None:
        if recursive.create_script_module is create:
            recursive.create_script_module = original

    return restore


@contextlib.contextmanager
def _taken_off(root: "nn.Module") -> Iterator[None]:
    """Take the hooks off a module and its parts during the block.

    Each keeps its place in the order.
    """
    tables: list[tuple[Any, OrderedDict[int, Any]]] = [
        (table, OrderedDict(table))
        for module in root.modules()
        for name in TABLES
        if _has_hook(table := vars(module).get(name, {}))
    ]
    for table, _ in tables:
        for number in [key for key, hook in table.items() if isinstance(hook, ModuleHook)]:
            del table[number]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


def first_tensor(output: Any, depth: int = 0) -> Any:
    """Return the first tensor of a module's output through which gradients flow."""
    if isinstance(output, sys.modules["torch"].Tensor):
        return output if output.grad_fn is not None else None
    if depth < 3:
        values = output.values() if hasattr(output, "values") else output
        if isinstance(values, list | tuple) or hasattr(output, "values"):
            return next(
                (one for value in values if (one := first_tensor(value, depth + 1)) is not None),
                None,
            )
    return None
