"""Run a Python script in this process in the same way as the interpreter would.

In addition, the keys of the script's process groups get a prefix in the launcher's store. The
launcher outlives an attempt, and the store still has the keys of earlier attempts.
"""

import builtins
import functools
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

RENDEZVOUS = "torch.distributed.rendezvous"
MAX_CHARACTERS = 16_384
"""The largest size of a command, in bytes, that fits into one message to a waiting process."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script or module of a Python command."""

    target: str
    """The path of a script, or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...]

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Self | None:
        """Return the script in a command whose program is this interpreter.

        Args:
            command: the program and its arguments.

        Returns:
            The script; None if the program is another one, if the command is very long or has
            options of Python other than `-u`, or if a file beside the script hides a module of the
            standard library that this process has already imported.
        """
        program, *words = command
        if not _is_this_interpreter(program):
            return None
        while words[:1] == ["-u"]:
            del words[0]
        is_module = words[:1] == ["-m"]
        if is_module:
            del words[0]
        if not words or words[0].startswith("-") or sum(map(len, words)) > MAX_CHARACTERS:
            return None
        script = cls(target=words[0], is_module=is_module, arguments=tuple(words[1:]))
        return None if script.hides(sys.stdlib_module_names) else script

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """Convert plain JSON values from `to_json` to a script."""
        return cls(
            target=plain["target"],
            is_module=plain["is_module"],
            arguments=tuple(plain["arguments"]),
        )

    def hides(self, modules: Collection[str]) -> bool:
        """Return True if a file beside the script hides one of the modules."""
        folder = Path.cwd() if self.is_module else Path(self.target).resolve().parent
        try:
            return any(
                one.stem in modules and (one.suffix == ".py" or (one / "__init__.py").exists())
                for one in folder.iterdir()
            )
        except OSError:
            return True

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def run(self) -> None:
        """Run the script as `__main__`. Exceptions of the script are not caught."""
        sys.argv = [self.target, *self.arguments]
        sys.excepthook = functools.partial(_show_without_own_frames, sys.excepthook)
        if self.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        path = Path(self.target)
        if not path.is_file() or path.suffix in (".pyc", ".zip", ".pyz"):
            runpy.run_path(self.target, run_name="__main__")
            return
        sys.path.insert(0, str(path.resolve().parent))
        main = ModuleType("__main__")
        main.__file__ = str(path.absolute())
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        main.__dict__.update({"__builtins__": builtins, "__cached__": None})
        sys.modules["__main__"] = main
        exec(
            compile(path.read_bytes(), main.__file__, "exec"), main.__dict__
        )  # the user's own script


def _is_this_interpreter(program: str) -> bool:
    # Two virtual environments may share one binary, so the folders must be the same, too.
    here = Path(sys.executable)
    try:
        return Path(program).samefile(here) and Path(program).parent.samefile(here.parent)
    except OSError:
        return False


def _show_without_own_frames(
    show: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an exception like the interpreter, beginning with the first frame of the user's code."""
    shown = traceback
    for is_before in (True, False):  # skip the callers of this module, and its own frames
        while shown is not None and _is_own(shown.tb_frame.f_code.co_filename) is not is_before:
            shown = shown.tb_next
    show(kind, error.with_traceback(shown), shown)


def _is_own(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent or file.startswith("<frozen runpy")


def give_store_prefix(prefix: str) -> None:
    """Put a prefix before the keys of this process's process groups in the launcher's store.

    The store lives as long as the launcher, so it still contains the addresses of ranks in earlier
    attempts.
    """
    if RENDEZVOUS in sys.modules:
        _prefix_stores(sys.modules[RENDEZVOUS], prefix)
    else:
        sys.meta_path.insert(0, _RendezvousFinder(prefix))


class _RendezvousFinder(importlib.abc.MetaPathFinder):
    """Set the prefix in torch's rendezvous as soon as the script imports torch.

    torch must not be imported sooner, since the script may set environment variables that torch
    reads during its import.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != RENDEZVOUS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_prefix(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                load(module)
                _prefix_stores(module, self._prefix)

            spec.loader.exec_module = load_and_prefix  # type: ignore[method-assign]
        return spec


def _prefix_stores(rendezvous: ModuleType, prefix: str) -> None:
    # torch has no public interface for a prefix. Both `env://` and `tcp://` create their store
    # here.
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_prefixed(*arguments: Any, **options: Any) -> Any:
        return sys.modules["torch.distributed"].PrefixStore(prefix, create(*arguments, **options))

    rendezvous._create_c10d_store = create_prefixed  # type: ignore[attr-defined]
