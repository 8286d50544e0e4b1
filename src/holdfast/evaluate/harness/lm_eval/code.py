"""Run generated code in the sandbox, by replacing `evaluate.load("code_eval")`.

Tasks that run code (HumanEval, MBPP and others) load `code_eval` of Hugging Face's evaluate
library. `code_eval` must be fetched from the Hub, and runs the code in a child process without a
sandbox. The replacement has the same interface and the same formula.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.core.errors import BadUse


class CodeEvalModule:
    """The metric that `evaluate.load("code_eval")` returns after the replacement."""

    def compute(
        self,
        *,
        references: list[str],
        predictions: list[list[str]],
        k: Sequence[int] = (1, 10, 100),
    ) -> Any:
        """Compute pass@k, and the outcome of each program.

        The formula is `pass_at_k` (Chen et al. 2021, arXiv:2107.03374).
        """
        from holdfast.evaluate.metrics.code_eval import pass_at_k

        return pass_at_k(references, predictions, k)


def install(*, confirmed: bool) -> None:
    """Replace `code_eval` by the sandbox, in this process and in processes forked from it.

    Unless `confirmed`, loading `code_eval` raises an error. Hugging Face's evaluate library takes
    seconds to import, so the replacement happens only when a task imports the library.
    """
    _Finder.confirmed = confirmed
    if (loaded := sys.modules.get("evaluate")) is not None:
        _replace(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Let Python import `evaluate`, then replace the `load` function of the module."""

    confirmed = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> Any:
        if fullname != "evaluate":
            return None
        sys.meta_path.remove(self)  # prevents infinite recursion
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _replace(module)


def _replace(evaluate: ModuleType) -> None:
    original = getattr(evaluate, "load", None)  # a foreign module of this name may lack `load`
    if original is None or getattr(original, "is_holdfast", False):
        return

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        if path != "code_eval":
            return original(path, *args, **kwargs)
        if not _Finder.confirmed:
            raise BadUse(
                "This task runs code that the model writes, in a sandbox. Set confirm_unsafe_code "
                "= true in the suite, "
                "or pass --confirm-unsafe-code, to allow it."
            )
        return CodeEvalModule()

    load.is_holdfast = True  # type: ignore[attr-defined]
    setattr(evaluate, "load", load)  # noqa: B010  a module's attribute, unknown to the types
