"""Hook modules in such a way that pickles, copies and scripts of a module contain no hook.

A user's script may save a whole model (`torch.save(model)`), and that file must load where Holdfast
is not installed. TorchScript compiles the hooks of a module, and rejects hooks that it cannot
compile.
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
"""The attributes of a module in which PyTorch stores the module's forward hooks."""


class ModuleHook:
    """A forward hook or forward pre-hook that Holdfast adds to a module."""

    def __init__(self, call: Callable[..., None]) -> None:
        """Wrap a function that takes the arguments of a forward hook or of a forward pre-hook."""
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the wrapped function with the arguments of the hook."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Some classes pickle their own hooks, such as torch.fx.GraphModule. There the hook is
        # pickled as a function that does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def outermost_modules() -> "list[nn.Module]":
    """Return all modules in this process that are not submodules of another module."""
    torch: Any = sys.modules["torch"]
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    return [one for one in modules if id(one) not in inner]


def keep_hooks_out() -> Callable[[], None]:
    """Patch PyTorch so that pickles, copies and scripts of a module leave out each `ModuleHook`.

    Returns:
        A function that undoes the patches.
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
            return  # another wrapper has replaced `reduce`
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
    # PyTorch scripts every module with this private function; there is no public one.
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
    """Remove Holdfast's hooks from a module and its submodules inside the `with` block.

    After the block, the hooks are back, in the same order among the other hooks.
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
    """Return the first tensor in a module's output that has a gradient function, else None."""
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
