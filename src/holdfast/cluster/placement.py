"""Define a place: a long-lived process, one a node, that connects to its caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from holdfast.core.errors import BadUse

ENV_PLACE = "HOLDFAST_PLACE"
"""The environment variable with the index of a placed command, from 0."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The state of one placed process.

    Attributes:
        index: the number of the place, from 0.
        host: the host on which the process runs or ran; empty if unknown.
        state: "waiting" for a node or for the start there; "running"; "ended", by itself or with
            its node.
        exit_code: the exit code of an ended process, negative for a signal; None if unknown, for
            example after the death of the node.
        why: further facts, such as the scheduler's reason; may be empty.
    """

    index: int
    host: str = ""
    state: Literal["waiting", "running", "ended"]
    exit_code: int | None = None
    why: str = ""


class Placement(Protocol):
    """Placed processes, for use in one thread.

    Every call but `stop` returns at once or after a short request to the cluster.
    """

    def poll(self) -> list[Place]:
        """Return the state of each place, by index."""
        ...

    def restart(self, index: int) -> bool:
        """Start an ended process again, in the same place.

        Returns:
            True if a start is under way; False if the process has not ended, or has no node any
            more.
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
        """Return the name or address of this machine to which placed processes connect.

        Raises:
            BadUse: the cluster does not answer.
        """
        ...

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> Placement:
        """Request nodes, and start the command once on each; return before the nodes are ready.

        When this process dies, for any reason, the processes of local and Ray are ended by their
        own machine, after their time to end by themselves. Slurm does not watch this process: there
        the placed processes must end by themselves when their connection is lost. The next start in
        the same folder cancels any that remain.

        Args:
            command: the command, equal on all nodes; `HOLDFAST_PLACE` in the environment differs.
            environment: variables added to each node's own. The values may be secrets: Holdfast
                puts them on no command line and into no file.
            folder: the folder for the logs `place-INDEX.log`, created if absent, for one placement
                at a time. Slurm needs a shared file system here, Ray the same path on each node.

        Raises:
            BadUse: the cluster refuses; the message has the cluster's error.
        """
        ...


def log_of_place(index: int, folder: Path) -> Path:
    """Return the path of a place's log."""
    return folder / f"place-{index}.log"


def check_command(command: Sequence[str]) -> None:
    """Check that there is a command to place.

    Raises:
        BadUse: the command is empty.
    """
    if not command:
        raise BadUse("There is no command to place. Give its argv.")
