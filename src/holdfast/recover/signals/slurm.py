"""Convert the states of nodes in Slurm to signals and notices.

The supervisor reads the states of all its nodes by one request, since a request from each node
would burden slurmctld.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from holdfast.cluster import SlurmNode, read_slurm_nodes
from holdfast.core.errors import HoldfastError
from holdfast.recover.signals.facts import (
    TEXT_LIMIT,
    CannotSee,
    Fact,
    NodeSignal,
    Notice,
    NoticeKind,
)

NAME: Final = "the state in Slurm"
PERIOD_S = 30.0
_MAINTENANCE = frozenset({"MAINT", "MAINTENANCE", "REBOOT", "REBOOT_REQUESTED"})
_HIDDEN = frozenset({"COMPLETING", "IDLE", "ALLOCATED", "MIXED", "PLANNED"})
"""The states that say nothing about the health of a node."""

SlurmStates = Callable[[Collection[str]], Mapping[str, Sequence[Fact]]]
"""A function that returns the facts about the nodes with the given names, or raises CannotSee."""


def slurm_states(
    names: Collection[str],
    read: Callable[[Collection[str]], Mapping[str, SlurmNode]] = read_slurm_nodes,
) -> dict[str, Sequence[Fact]]:
    """Return the facts about each node that Slurm knows; block for a few seconds at most.

    Raises:
        CannotSee: Slurm does not answer.
    """
    try:
        return {name: facts_of(node) for name, node in read(names).items()}
    except HoldfastError as error:
        raise CannotSee(str(error)) from error


def facts_of(node: SlurmNode) -> Sequence[Fact]:
    """Return the facts in the state of a node. A drain that Holdfast requested is no fact."""
    words = "+".join(sorted(node.states - _HIDDEN)).lower()
    text = (f"{words}: {node.reason}" if node.reason else words)[:TEXT_LIMIT]
    if node.is_lost:
        return [NodeSignal(source=NAME, name="scheduler-down", text=text)]
    if node.is_leaving and node.source != "holdfast":
        kind: NoticeKind = "maintenance" if node.states & _MAINTENANCE else "drain"
        return [Notice(source=NAME, kind=kind, text=text)]
    return []


def states_here() -> SlurmStates | None:
    """Return a function that reads the states, if this process is part of a Slurm job; else None."""
    return slurm_states if "SLURM_JOB_ID" in os.environ else None
