"""Place processes on this machine, each on a leash (see `leash`)."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cluster.leash import release, release_all, start_on_leash
from holdfast.cluster.placement import ENV_PLACE, Place, check_command, log_of_place


@dataclass(frozen=True, kw_only=True)
class LocalPlaces:
    """Treat this machine as `nodes` nodes; each process sees the whole machine.

    If this process dies, the placed processes have `linger_s` seconds to end by themselves.
    """

    nodes: int
    linger_s: float = 0.0

    def address_host(self) -> str:
        """See `Places.address_host`."""
        return "127.0.0.1"

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> "LocalPlacement":
        """See `Places.start`."""
        check_command(command)
        folder.mkdir(parents=True, exist_ok=True)
        return LocalPlacement(tuple(command), dict(environment), folder.absolute(), self)


class LocalPlacement:
    """Run one process on a leash for each place."""

    def __init__(
        self,
        command: tuple[str, ...],
        environment: dict[str, str],
        folder: Path,
        places: LocalPlaces,
    ) -> None:
        self._command, self._environment, self._folder = command, environment, folder
        self._linger_s = places.linger_s
        self._host = socket.gethostname()
        self._leashed: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(places.nodes):
                self._leashed.append(self._start(index, append=False))
        except BaseException:
            release_all(self._leashed)
            raise

    def poll(self) -> list[Place]:
        """See `Placement.poll`."""
        return [self._place(index, leashed.poll()) for index, leashed in enumerate(self._leashed)]

    def restart(self, index: int) -> bool:
        """See `Placement.restart`."""
        if self._leashed[index].poll() is None:
            return False
        release(self._leashed[index])
        self._leashed[index] = self._start(index, append=True)
        return True

    def stop(self) -> None:
        """See `Placement.stop`."""
        release_all(self._leashed)

    def _place(self, index: int, exit_code: int | None) -> Place:
        if exit_code is None:
            return Place(index=index, host=self._host, state="running")
        return Place(index=index, host=self._host, state="ended", exit_code=exit_code)

    def _start(self, index: int, *, append: bool) -> subprocess.Popen[bytes]:
        return start_on_leash(
            self._command,
            log_of_place(index, self._folder),
            append=append,
            environment={**os.environ, **self._environment, ENV_PLACE: str(index)},
            linger_s=self._linger_s,
        )
