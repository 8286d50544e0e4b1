"""Provide bad nodes: emulated nodes for statistics, and a real node whose connections break.

`EmulatedNodes` draws the results of node tests at random. `BreakingLink` makes a node of this
machine bad: at random, the TCP connections between the ranks are cut before a collective, as with a
failing network card. Because the cut is real, gloo and torch report their own errors on all nodes
that take part.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import random
import socket
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ENV_LINK = "HOLDFAST_TESTING_BAD_LINK"
"""The environment variable with the path of a file; collectives fail while the file exists."""
FAILING_SHARE = 0.5
"""The probability that the connections of a bad node are cut before a collective."""
_COLLECTIVES = ("all_gather", "all_reduce", "barrier")
_AT_START = """\
from holdfast.testing.bad_nodes import watch_imports

watch_imports()
"""
"""The source of the module `sitecustomize`, which Python imports when it starts on the node."""


class EmulatedNodes:
    """A cluster in which each faulty node fails its tests with a given probability.

    Attributes:
        names: the names of all nodes.
        rates: the probability, in [0, 1], that a test with the faulty node fails, by the node's
            name.
    """

    def __init__(self, count: int, rates: Mapping[str, float], source: random.Random) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.rates = dict(rates)
        self._source = source

    @classmethod
    def drawn(cls, count: int, *, bad: int, rate: float, source: random.Random) -> "EmulatedNodes":
        """Create a cluster of `count` nodes, `bad` of which, drawn at random, are faulty.

        A test with a faulty node fails with the probability `rate`.
        """
        names = [f"n{number}" for number in range(1, count + 1)]
        return cls(count, dict.fromkeys(source.sample(names, bad), rate), source)

    def passes(self, world: Sequence[str]) -> bool:
        """Run one test with the given nodes together; return True if it passed."""
        return all(self._source.random() >= self.rates.get(name, 0.0) for name in world)


class BreakingLink:
    """A node's network link that works until `break_now` is called.

    After that, the link fails before a share `FAILING_SHARE` of the node's collectives. Start the
    processes of the node with the variables that `environment` returns.
    """

    def __init__(self, folder: Path) -> None:
        """Create a folder, with a module that fails collectives once the link is broken."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_AT_START)
        self._folder = folder.absolute()
        self._is_broken = self._folder / "broken"

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for the node's processes.

        `before` holds the variables to which these are added.
        """
        paths = filter(None, (str(self._folder), before.get("PYTHONPATH", "")))
        return {"PYTHONPATH": os.pathsep.join(paths), ENV_LINK: str(self._is_broken)}

    def break_now(self) -> None:
        """Make the link fail from now on."""
        self._is_broken.touch()


def watch_imports() -> None:
    """Patch torch in this process, so that collectives fail while the file of `ENV_LINK` exists."""
    if ENV_LINK in os.environ:
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """An import hook that patches modules of torch when the program imports them.

    The hook itself does not import torch.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec, with a loader that patches the module after loading it."""
        change = _CHANGES.get(name)
        spec = None if change is None else importlib.machinery.PathFinder.find_spec(name, path)
        if change is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change_collectives(module: ModuleType) -> None:
    for name in _COLLECTIVES:
        setattr(module, name, _failing(getattr(module, name)))


def _change_parallel(module: ModuleType) -> None:
    # Change `forward`, since the gradients are summed in C++ during the backward pass.
    parallel = module.DistributedDataParallel
    parallel.forward = _failing(parallel.forward)


_CHANGES: Mapping[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": _change_collectives,
    "torch.nn.parallel.distributed": _change_parallel,
}


def _failing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*arguments: Any, **named: Any) -> Any:
        if Path(os.environ[ENV_LINK]).exists() and random.random() < FAILING_SHARE:
            cut_connections()
        return call(*arguments, **named)

    return called


def cut_connections() -> int:
    """Cut this process's TCP connections to other ranks; return the number of cut connections.

    The connections to the launcher's store and to the agent are not cut, because in a cluster they
    use another network.
    """
    spared = {
        os.environ.get("MASTER_PORT"),
        os.environ.get("HOLDFAST_CHANNEL", "").rpartition(":")[2],
    }
    return sum(_is_cut(int(one.name), spared) for one in Path("/proc/self/fd").iterdir())


def _is_cut(descriptor: int, spared: Collection[str | None]) -> bool:
    """Cut the connection of a file descriptor, unless the connection is spared.

    Returns:
        True if a connection was cut; False if the connection is spared, or there is none.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.type != socket.SOCK_STREAM:
                return False
            if str(connection.getpeername()[1]) in spared:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:  # closed meanwhile, or not connected
        return False
