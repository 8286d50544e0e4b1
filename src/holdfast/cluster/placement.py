"""Define the interface for long-lived processes, one on each node, that connect to their caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from holdfast.core.errors import BadUse

ENV_PLACE = "HOLDFAST_PLACE"
"""The environment variable with the index of a placed process, from 0."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The state of one placed process.

    Attributes:
        index: the number of the place, from 0.
        host: the host on which the process runs or ran; empty if unknown.
        state: "waiting" if the process waits for a node or for its start there; "running"; "ended"
            if the process ended or its node died.
        exit_code: the exit code of an ended process, negative for a signal; None if unknown, for
            example after the death of the node.
        why: the reason for the state, such as the scheduler's reason for waiting; may be empty.
    """

    index: int
    host: str = ""
    state: Literal["waiting", "running", "ended"]
    exit_code: int | None = None
    why: str = ""


class Placement(Protocol):
    """Control placed processes; use it from one thread only.

    Every method except `stop` returns at once or after a short request to the cluster.
    """

    def poll(self) -> list[Place]:
        """Return the state of each place, in the order of their indexes."""
        ...

    def restart(self, index: int) -> bool:
        """Start an ended process again, in the same place.

        Returns:
            True if the start was requested; False if the process has not ended, or no longer has a
            node.
        """
        ...

    def stop(self) -> None:
        """End all processes with all their descendants; a second call does nothing.

        Raises:
            HoldfastError: the processes may still run; the message states how to end them by hand.
        """
        ...


class Places(Protocol):
    """Nodes on which processes can be placed."""

    def address_host(self) -> str:
        """Return this machine's name or address, to which placed processes can connect.

        Raises:
            BadUse: the cluster does not answer.
        """
        ...

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> Placement:
        """Request nodes, and start the command once on each; return before the nodes are ready.

        If this process dies, for any reason, the placed processes must end, too. With "local" and
        "ray", their own machine ends them after `linger_s` seconds. Slurm does not watch this
        process, so with "slurm" the placed processes must end by themselves when their connection
        is lost. The next start in the same folder cancels any that remain.

        Args:
            command: the command, which is the same on all nodes; only the variable `HOLDFAST_PLACE`
                differs.
            environment: variables to add to each node's own. The values may be secrets: Holdfast
                puts them on no command line and into no file.
            folder: the folder for the logs `place-INDEX.log`, created if absent. Use a folder for
                one placement at a time. Slurm needs a shared file system here, Ray the same path on
                each node.

        Raises:
            BadUse: the cluster refuses; the message has the cluster's error.
        """
        ...


def log_of_place(index: int, folder: Path) -> Path:
    """Return the path of the log of a placed process."""
    return folder / f"place-{index}.log"


def check_command(command: Sequence[str]) -> None:
    """Check that the command to place is not empty.

    Raises:
        BadUse: the command is empty.
    """
    if not command:
        raise BadUse("There is no command to place. Give its argv.")
