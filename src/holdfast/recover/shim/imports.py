"""Learn which modules a trainer imports, so that a warm process can import them before it is needed."""

import contextlib
import importlib
import json
import os
import site
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ENV_FOLDER = "HOLDFAST_IMPORTS"
"""The folder in which each rank writes what it has imported."""
DEVICE_FILES = "/dev/nvidia"
LATER_IMPORTS = ("torch._dynamo",)
"""Modules that torch imports at the first backward pass or step of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What a trainer had imported, and the environment variables that its script had changed."""

    modules: tuple[str, ...]
    """In the order of their import; of installed packages alone, since the user's own files may change."""
    environment: dict[str, str | None]
    """None: the variable was removed. Libraries read some variables when they are imported."""

    @classmethod
    def of_this_process(cls) -> Self:
        """Return those of this process."""
        began = _first_environment()
        now = dict(os.environ)
        changed = {name: now.get(name) for name in began.keys() | now.keys()}
        return cls(
            modules=tuple(name for name in list(sys.modules) if _is_installed(name)),
            environment={
                name: value
                for name, value in changed.items()
                if value != began.get(name) and not name.startswith("HOLDFAST_")
            },
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what `write` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is no such file, or it holds something else.
        """
        plain = json.loads(path.read_text())
        return cls(
            modules=tuple(map(str, plain["modules"])), environment=dict(plain["environment"])
        )

    def write(self, path: Path) -> None:
        """Write to a file.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(json.dumps({"modules": self.modules, "environment": self.environment}))

    def load(self) -> None:
        """Set the environment variables and import the modules.

        Modules that cannot be imported are left out: the trainer itself meets the error again.
        """
        for variable, value in self.environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        for name in (*self.modules, *(LATER_IMPORTS if "torch" in self.modules else ())):
            # An import runs the code of a package, which may end in any way.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)


def imports_path(rank: int) -> Path:
    """Return the file in which a rank of this job writes what it has imported.

    Raises:
        KeyError: no supervisor started this process.
    """
    return Path(os.environ[ENV_FOLDER]) / f"rank-{rank}.json"


def can_fork() -> bool:
    """Return whether a fork of this process can do all that a new process can.

    A fork has one thread, and no device that its parent has opened.
    """
    if threading.active_count() > 1 or len([*Path("/proc/self/task").iterdir()]) > 1:
        return False
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing is closed by now
            if str(descriptor.readlink()).startswith(DEVICE_FILES):
                return False
    return True


def _first_environment() -> dict[str, str]:
    """Return the environment that this process began with."""
    began = {}
    for word in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, equals, value = word.partition(b"=")
        if equals:
            began[os.fsdecode(name)] = os.fsdecode(value)
    return began


def _is_installed(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name == "__main__" or spec is None or spec.name != name:
        return False
    origin = spec.origin or ""
    return origin in ("built-in", "frozen") or origin.startswith(_installed_in())


def _installed_in() -> tuple[str, ...]:
    folders = [
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        str(Path(__file__).parents[3]),
    ]
    return tuple(f"{folder}{os.sep}" for folder in folders)
