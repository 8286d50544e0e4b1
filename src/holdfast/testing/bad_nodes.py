"""Bad nodes: emulated nodes for statistics, and a real node whose connections break.

`EmulatedNodes` draws the results of tests at random. `BreakingLink` makes a node of this machine
bad: as with a failing network card, each collective may find the TCP connections between the ranks
cut. The cut is real, so gloo and torch report their own errors on all nodes that take part.
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
"""The variable with the path of a file; while the file exists, the process's collectives fail."""
FAILING_SHARE = 0.5
"""The share of the collectives of a bad node before which the connections are cut."""
_COLLECTIVES = ("all_gather", "all_reduce", "barrier")
_AT_START = """\
from holdfast.testing.bad_nodes import watch_imports

watch_imports()
"""
"""The source of `sitecustomize`, which Python imports at its start on the node."""


class EmulatedNodes:
    """A cluster whose faulty nodes fail each of their tests with a rate of their own.

    Attributes:
        names: the names of all nodes.
        rates: the rate of failure of each faulty node, in [0, 1], by the node's name.
    """

    def __init__(self, count: int, rates: Mapping[str, float], source: random.Random) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.rates = dict(rates)
        self._source = source

    @classmethod
    def drawn(cls, count: int, *, bad: int, rate: float, source: random.Random) -> "EmulatedNodes":
        """Return a cluster of `count` nodes; `bad` nodes, drawn at random, fail with `rate`."""
        names = [f"n{number}" for number in range(1, count + 1)]
        return cls(count, dict.fromkeys(source.sample(names, bad), rate), source)

    def passes(self, world: Sequence[str]) -> bool:
        """Test some nodes together once; return True if the test passed."""
        return all(self._source.random() >= self.rates.get(name, 0.0) for name in world)


class BreakingLink:
    """A node's link that works until `break_now`.

    From then on the link fails in `FAILING_SHARE` of the node's collectives. Start the processes of
    the node with the variables of `environment`.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare a folder for the link's module and for the file that breaks the link."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_AT_START)
        self._folder = folder.absolute()
        self._is_broken = self._folder / "broken"

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to add to the variables `before` of the node's processes."""
        paths = filter(None, (str(self._folder), before.get("PYTHONPATH", "")))
        return {"PYTHONPATH": os.pathsep.join(paths), ENV_LINK: str(self._is_broken)}

    def break_now(self) -> None:
        """Make the link fail from now on."""
        self._is_broken.touch()


def watch_imports() -> None:
    """Make the collectives of torch fail in this process while the file of `ENV_LINK` exists."""
    if ENV_LINK in os.environ:
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """A finder that changes modules of torch as the program imports them.

    The finder itself imports no module of torch.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that changes the module after its import."""
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
    # The gradients are summed in C++ during the backward pass that follows.
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

    The connections to the launcher's store and to the agent remain: in a cluster they use another
    network.
    """
    spared = {
        os.environ.get("MASTER_PORT"),
        os.environ.get("HOLDFAST_CHANNEL", "").rpartition(":")[2],
    }
    return sum(_is_cut(int(one.name), spared) for one in Path("/proc/self/fd").iterdir())


def _is_cut(descriptor: int, spared: Collection[str | None]) -> bool:
    """Cut a descriptor's connection, if the descriptor belongs to a TCP connection."""
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
