"""Find and hook the modules that the optimizers of a process train.

A process may train several models. For each optimizer, the hooked modules are the outermost modules
that contain parameters of this optimizer. If these modules are never called, as with a
LightningModule, their submodules are hooked instead.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from holdfast.profile.module_hooks import ModuleHook, outermost_modules

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

MAX_ROOTS: Final = 16
"""The most modules hooked for one optimizer."""
SILENT_STEPS: Final = 3
"""Optimizer steps without a forward pass of the hooked modules, before submodules are hooked."""
MAX_SEARCHES: Final = 8
"""The most searches for modules in a process.

A search takes up to a second. It finds nothing if the optimizer steps copies of the parameters.
"""


@dataclass
class _Trained:
    """The modules that one optimizer trains.

    The references to the modules are weak, so a model that the script deletes frees its memory.
    """

    roots: "list[weakref.ref[Module]]" = field(default_factory=list)
    forwards: int = 0
    """The number of forward passes of these modules up to the optimizer's last step."""
    silent_steps: int = 0

    def living(self) -> "list[Module]":
        return [root for ref in self.roots if (root := ref()) is not None]


class TrainedModules:
    """Find and hook the modules that are trained in this process."""

    def __init__(self, begins: Callable[..., None], ends: Callable[..., None]) -> None:
        """Store the two hooks; modules are hooked later.

        Args:
            begins: the forward pre-hook, called before each forward pass of a hooked module.
            ends: the forward hook, called after each forward pass of a hooked module.
        """
        self._begins, self._ends = begins, ends
        self._is_given = False
        self._searches = 0
        self._of: weakref.WeakKeyDictionary[Optimizer, _Trained] = weakref.WeakKeyDictionary()
        self._removals: weakref.WeakKeyDictionary[Module, list[Callable[[], None]]] = (
            weakref.WeakKeyDictionary()
        )
        self._forwards: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()

    def hook_given(self, modules: "Sequence[Module]") -> None:
        """Hook the given modules, and search for no others from now on."""
        self._is_given = True
        for module in modules:
            self._hook(module)

    def note_forward(self, module: "Module") -> None:
        """Count a forward pass of a hooked module."""
        self._forwards[module] = self._forwards.get(module, 0) + 1

    def note_step(self, optimizer: "Optimizer") -> None:
        """Search for an optimizer's modules at its first step, or if they are never called."""
        if self._is_given:
            return
        trained = self._of.setdefault(optimizer, _Trained())
        forwards = sum(self._forwards.get(root, 0) for root in trained.living())
        trained.silent_steps = 0 if forwards != trained.forwards else trained.silent_steps + 1
        trained.forwards = forwards
        is_silent = not trained.roots or trained.silent_steps >= SILENT_STEPS
        if is_silent and self._searches < MAX_SEARCHES:
            self._searches += 1
            self._search(optimizer, trained)

    def remove(self) -> None:
        """Remove all hooks."""
        for module in list(self._removals):
            self._unhook(module)

    def _search(self, optimizer: "Optimizer", trained: _Trained) -> None:
        wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
        before = trained.living()
        found = [child for root in before for child in root.children()] or outermost_modules()
        roots = [root for root in found if any(id(one) in wanted for one in root.parameters())]
        trained.silent_steps = 0
        if not roots:
            return
        trained.roots = [weakref.ref(root) for root in roots[:MAX_ROOTS]]
        for root in trained.living():
            self._hook(root)
        trained.forwards = sum(self._forwards.get(root, 0) for root in trained.living())
        kept = {id(root) for one in self._of.values() for root in one.living()}
        for root in before:
            if id(root) not in kept:
                self._unhook(root)

    def _hook(self, root: "Module") -> None:
        if root in self._removals or root._compiled_call_impl is not None:
            return  # compiled in place: a hook would cause a recompilation
        self._removals[root] = [
            root.register_forward_pre_hook(ModuleHook(self._begins), prepend=True).remove,
            root.register_forward_hook(ModuleHook(self._ends)).remove,
        ]

    def _unhook(self, root: Any) -> None:
        for removal in self._removals.pop(root, []):
            removal()
