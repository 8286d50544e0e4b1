"""What a place is: a long-lived process, one a node, that dials back to whoever wanted it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from holdfast.core.errors import BadUse

ENV_PLACE = "HOLDFAST_PLACE"
"""In the environment of every placed command: its number, from 0."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How one of the processes is.

    Attributes:
        index: its number, from 0.
        host: where it runs or ran; empty while that is not known.
        state: "waiting" for a node, or for its start there; "running"; "ended", by itself or with its node.
        exit_code: of one that ended, negative for a signal; None where nobody could tell, as when its node died.
        why: what is known beyond that, such as what the scheduler says; may be empty.
    """

    index: int
    host: str = ""
    state: Literal["waiting", "running", "ended"]
    exit_code: int | None = None
    why: str = ""


class Placement(Protocol):
    """Processes that were placed. Of one thread; every call but `stop` returns at once or after a short question."""

    def poll(self) -> list[Place]:
        """How each of them is, by index."""
        ...

    def restart(self, index: int) -> bool:
        """Start one that ended again, in its place.

        Returns:
            Whether that is under way; not if it has not ended, or if there is no node for it any more.
        """
        ...

    def stop(self) -> None:
        """End all of them with all their descendants; does nothing the second time.

        Raises:
            HoldfastError: they may still run; it says how to end them by hand.
        """
        ...


class Places(Protocol):
    """Nodes to be had."""

    def address_host(self) -> str:
        """The name or address of this machine to which the placed processes dial.

        Raises:
            BadUse: the cluster does not answer.
        """
        ...

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> Placement:
        """Start the command once a node, as nodes come; returns before they have.

        When this process is gone, however it went, local and Ray's processes are ended by the machine they run on,
        after the time that they were given to end by themselves.
        Slurm knows nothing of this process: its processes must end by themselves when nobody answers them, and what
        is left of them is cancelled by the next start in the same folder.

        Args:
            command: argv, the same on every node, which tells itself apart by `HOLDFAST_PLACE`.
            environment: added to the environment that a process has on its node. It may hold secrets: it is passed
                on no command line and stands in no file of Holdfast's.
            folder: made if absent; `place-INDEX.log` there is what a process printed. Of one placement at a time; for
                Slurm on a file system that all nodes share, for Ray the same path on each node.

        Raises:
            BadUse: the cluster refuses; with its words.
        """
        ...


def log_of_place(index: int, folder: Path) -> Path:
    """Where the place's log is."""
    return folder / f"place-{index}.log"


def check_command(command: Sequence[str]) -> None:
    """Refuse to place nothing.

    Raises:
        BadUse: the command is empty.
    """
    if not command:
        raise BadUse("There is no command to place. Give its argv.")
