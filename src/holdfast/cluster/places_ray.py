"""Place processes on the nodes of a Ray cluster: one actor on each node of a placement group."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cluster.leash import sign_of_life, start_on_leash
from holdfast.cluster.placement import ENV_PLACE, Place, check_command, log_of_place
from holdfast.cluster.ray import connected, demand_ray
from holdfast.core.errors import BadUse


@dataclass(frozen=True, kw_only=True)
class RayPlaces:
    """Request `nodes` different nodes of the Ray at RAY_ADDRESS, or one node of a Ray started here.

    Attributes:
        nodes: the number of nodes.
        gpus_per_node: the GPUs of each actor; Ray sets CUDA_VISIBLE_DEVICES, so that the command
            sees only these GPUs.
        cpus_per_node: the CPUs of each actor; None means 1.
        linger_s: the seconds that placed processes have to end by themselves after the death of
            this process.

    Raises:
        BadUse: Ray is not installed.
    """

    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        demand_ray()

    def address_host(self) -> str:
        """See `Places.address_host`."""
        if not _has_cluster():
            return _LOOPBACK
        with connected(None) as ray:
            return str(ray.util.get_node_ip_address())

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> "RayPlacement":
        """See `Places.start`."""
        check_command(command)
        if self.nodes > 1 and not _has_cluster():
            raise BadUse(
                f"{self.nodes} nodes need a Ray cluster. Set RAY_ADDRESS to a cluster, or request one node."
            )
        is_ours = not _has_cluster()
        with ExitStack() as stack:
            ray = stack.enter_context(connected(self.cpus_per_node))
            host = _LOOPBACK if is_ours else str(ray.util.get_node_ip_address())
            return RayPlacement(
                self, ray, host, tuple(command), dict(environment), folder.absolute(), stack
            )


_LOOPBACK = "127.0.0.1"
_STOP_TIMEOUT_S = 10.0


def _has_cluster() -> bool:
    """Return True if there is a Ray cluster to join.

    The function does not import Ray, because the import takes a second.
    """
    return bool(os.environ.get("RAY_ADDRESS")) or (
        "ray" in sys.modules and sys.modules["ray"].is_initialized()
    )


@dataclass(kw_only=True)
class _Actor:
    """A requested actor, with the futures of its host name and of its command's exit code."""

    handle: Any
    host: Any
    exit_code: Any


class RayPlacement:
    """Run one actor for each place.

    If this process dies, Ray ends the actors at once, and each actor's leash ends its command.
    """

    def __init__(
        self,
        places: RayPlaces,
        ray: Any,
        host: str,
        command: tuple[str, ...],
        environment: dict[str, str],
        folder: Path,
        connection: ExitStack,
    ) -> None:
        self._ray, self._nodes = ray, places.nodes
        self._command, self._environment, self._folder = command, environment, folder
        self._linger_s = places.linger_s
        # An actor may end while this process is alive. Then its command must not continue next to
        # the command of the actor that replaces it.
        self._owner = sign_of_life(host) if places.linger_s > 0 else ""
        self._needs = {"CPU": places.cpus_per_node or 1}
        if places.gpus_per_node:
            self._needs["GPU"] = places.gpus_per_node
        bundles = [self._needs] * places.nodes
        strategy = "STRICT_SPREAD" if places.nodes > 1 else "PACK"
        self._group = ray.util.placement_group(bundles, strategy=strategy)
        self._actors = [self._start(index, append=False) for index in range(places.nodes)]
        # From here on, `stop` disconnects.
        self._connection: ExitStack | None = connection.pop_all()

    def poll(self) -> list[Place]:
        """See `Placement.poll`."""
        if self._connection is None:
            return [
                Place(index=index, state="ended", why="it was stopped")
                for index in range(self._nodes)
            ]
        return [self._place(index) for index in range(self._nodes)]

    def restart(self, index: int) -> bool:
        """Start an ended process again; see `Placement.restart`.

        If the node died, the new process waits until Ray has another node. If Ray has not yet
        noticed the death, the new process ends at once, as the old one did.
        """
        if self._connection is None or self._place(index).state != "ended":
            return False
        # The actor may live on without its command, or be cut off.
        self._ray.kill(self._actors[index].handle)
        self._actors[index] = self._start(index, append=True)
        return True

    def stop(self) -> None:
        """See `Placement.stop`."""
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        with connection:
            for actor in self._actors:
                self._ray.kill(actor.handle)
            # The leashes still check whether this process lives.
            ends = [actor.exit_code for actor in self._actors]
            self._ray.wait(ends, num_returns=len(ends), timeout=_STOP_TIMEOUT_S)
            self._ray.util.remove_placement_group(self._group)

    def _start(self, index: int, *, append: bool) -> _Actor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        within = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        handle = (
            self._ray.remote(_Leashed)
            .options(
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs.get("GPU", 0),
                scheduling_strategy=within,
            )
            .remote()
        )
        # The environment may hold secrets. It is passed to the actor's method, because Ray's head
        # node keeps the arguments of an actor's constructor.
        log = str(log_of_place(index, self._folder))
        environment = {**self._environment, ENV_PLACE: str(index)}
        host = handle.start.remote(
            self._command, environment, log, append, self._linger_s, self._owner
        )
        return _Actor(handle=handle, host=host, exit_code=handle.wait.remote())

    def _place(self, index: int) -> Place:
        actor, host = self._actors[index], ""
        try:
            if not self._is_ready(actor.host):
                return Place(index=index, state="waiting", why=self._why_waiting())
            host = self._ray.get(actor.host)
            if not self._is_ready(actor.exit_code):
                return Place(index=index, host=host, state="running")
            return Place(
                index=index, host=host, state="ended", exit_code=self._ray.get(actor.exit_code)
            )
        except self._ray.exceptions.RayError as error:  # the actor or its node died
            first_line = str(error).strip().partition("\n")[0]
            return Place(index=index, host=host, state="ended", why=first_line)

    def _is_ready(self, promise: Any) -> bool:
        return bool(self._ray.wait([promise], timeout=0)[0])

    def _why_waiting(self) -> str:
        fit = sum(
            node["Alive"]
            and all(
                node["Resources"].get(name, 0) >= amount for name, amount in self._needs.items()
            )
            for node in self._ray.nodes()
        )
        return f"Ray has {fit} nodes with {self._needs}, free or not; {self._nodes} are requested"


class _Leashed:
    """Run the command on a leash; an actor of Ray."""

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        append: bool,
        linger_s: float,
        owner: str,
    ) -> str:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        # The environment of Ray's worker comes first, because Ray sets the actor's GPUs there.
        variables = {**os.environ, **environment}
        self._leashed = start_on_leash(
            command, Path(log), append=append, environment=variables, linger_s=linger_s, owner=owner
        )
        return socket.gethostname()

    def wait(self) -> int:
        exit_code = self._leashed.wait()
        assert self._leashed.stdin is not None
        # Close the leash's input without a byte, as a caller's death would. Ray may have killed the
        # leash's process, and also ends this actor because the actor's owner died.
        self._leashed.stdin.close()
        return exit_code
