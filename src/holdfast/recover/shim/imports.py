"""Record the modules that a trainer imports, so that a warm process can import them in advance."""

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
from typing import Final, Self

ENV_FOLDER = "HOLDFAST_IMPORTS"
"""The folder with the list of imported modules of each rank."""
LIBRARY_VARIABLES: Final = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "NUMEXPR_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)
"""The prefixes of environment variables that libraries read when they are imported."""
HARMLESS_DEVICES: Final = (
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
    "/dev/pts/",
    "/dev/shm/",
    "/dev/tty",
)
"""Devices that a fork may share with its parent. GPUs are not among them."""
LATER_IMPORTS = ("torch._dynamo",)
"""Modules that torch imports only at the first backward pass, or at the first step of an optimizer.
"""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """The modules that a trainer has imported, and its changes of environment variables."""

    modules: tuple[str, ...]
    """The imported modules, in the order of their import.

    Only modules of installed packages are listed, since the user's own files may change.
    """
    environment: dict[str, str | None]
    """The changed environment variables of libraries; None if the variable was removed."""

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the imports and the changed variables of this process."""
        began = _first_environment()
        now = dict(os.environ)
        changed = {name: now.get(name) for name in began.keys() | now.keys()}
        folders = _installed_in()
        return cls(
            modules=tuple(name for name in list(sys.modules) if _is_installed(name, folders)),
            environment={
                name: value
                for name, value in changed.items()
                if value != began.get(name) and name.startswith(LIBRARY_VARIABLES)
            },
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read imports from a file that `write` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file does not exist, or was not written by
                `write`.
        """
        plain = json.loads(path.read_text())
        return cls(
            modules=tuple(map(str, plain["modules"])), environment=dict(plain["environment"])
        )

    def write(self, path: Path) -> None:
        """Write the imports to a file.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(json.dumps({"modules": self.modules, "environment": self.environment}))

    def load(self) -> None:
        """Set the environment variables and import the modules.

        A module that cannot be found is ignored here: the trainer reports the error when it imports
        the module.

        Raises:
            Exception: an import failed half-way, so that only a part of a package is imported.
        """
        for variable, value in self.environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        for name in (*self.modules, *(LATER_IMPORTS if "torch" in self.modules else ())):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


def imports_path(rank: int) -> Path:
    """Return the file for this rank's imported modules.

    Raises:
        KeyError: no supervisor started this process.
    """
    return Path(os.environ[ENV_FOLDER]) / f"rank-{rank}.json"


def can_fork() -> bool:
    """Return True if a fork of this process would work like a new process.

    This is so if there is only one thread, since a fork lacks all other threads.
    """
    if threading.active_count() > 1:
        return False
    # Libraries such as OpenBLAS end their threads before a fork and restart them on demand.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len([*Path("/proc/self/task").iterdir()]) == 1


def has_device() -> bool:
    """Return True if this process has opened a device that a fork cannot use, such as a GPU."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
            file = str(descriptor.readlink())
            if file.startswith("/dev/") and not file.startswith(HARMLESS_DEVICES):
                return True
    return False


def _first_environment() -> dict[str, str]:
    """Return the environment that this process began with."""
    began = {}
    for word in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, equals, value = word.partition(b"=")
        if equals:
            began[os.fsdecode(name)] = os.fsdecode(value)
    return began


def _is_installed(name: str, folders: tuple[str, ...]) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name == "__main__" or getattr(spec, "name", None) != name:
        return False
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and (
        origin in ("built-in", "frozen") or origin.startswith(folders)
    )


def _installed_in() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[3])]
    return tuple(f"{folder}{os.sep}" for folder in folders)
