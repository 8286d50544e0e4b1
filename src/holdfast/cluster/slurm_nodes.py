"""Read the states of nodes from Slurm."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.cluster.slurm import run_slurm_command
from holdfast.core.errors import HoldfastError

PREFIX = "holdfast:"
"""The start of the reason that Holdfast gives when it drains a node."""
KUBERNETES = "k8s:"
"""The start of the reason of a drain that follows a cordon in Kubernetes.

Such drains exist in clusters that run Slurm in Kubernetes.
"""
LOST = frozenset(
    ["DOWN", "ERROR", "FAIL", "FUTURE", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"]
)
"""The state words of a node on which nothing runs.

NOT_RESPONDING is not among them, because a node also has that state for a short time after a start
of slurmctld.
"""
DRAINED = frozenset(["DRAIN", "DRAINED", "DRAINING"])
LEAVING = DRAINED | {"FAILING", "MAINT", "MAINTENANCE", "REBOOT", "REBOOT_REQUESTED"}
"""The state words of a node that takes no new jobs and is about to be repaired or restarted."""
_FLAGS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "%": "POWERING_DOWN",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "$": "MAINT",
}
"""The meaning of the signs after a state; see "NODE STATE CODES" in sinfo(1)."""
_SET_BY = re.compile(r"(?P<reason>.*?)\s*\[(?P<user>[^\[\]@]*)@(?P<at>[^\[\]]*)\]\s*")


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """The state of a node, as Slurm records it.

    Attributes:
        name: the name of the node in Slurm.
        states: the words of the state, such as {"IDLE", "DRAIN"}.
        reason: the reason that a person or a program gave for the state; may be empty.
        set_by: the user who gave the reason; may be empty.
        reservation: the name of the reservation that includes the node; may be empty.
    """

    name: str
    states: frozenset[str]
    reason: str = ""
    set_by: str = ""
    reservation: str = ""

    @property
    def is_lost(self) -> bool:
        """Return True if no process can run on the node."""
        return bool(self.states & LOST)

    @property
    def is_leaving(self) -> bool:
        """Return True if Slurm assigns no new jobs to the node."""
        return bool(self.states & LEAVING)

    @property
    def is_drained(self) -> bool:
        """Return True if a person or a program has drained the node; running jobs may continue."""
        return bool(self.states & DRAINED)

    @property
    def source(self) -> str:
        """Return who gave the reason: "holdfast", "kubernetes" or "person".

        The result is empty if there is no reason.
        """
        if not self.reason:
            return ""
        if self.reason.startswith(PREFIX):
            return "holdfast"
        return "kubernetes" if self.reason.startswith(KUBERNETES) else "person"


def read_slurm_nodes(
    names: Collection[str] = (), command: Callable[..., str] = run_slurm_command
) -> dict[str, SlurmNode]:
    """Read the states of the named nodes from Slurm; if no names are given, of all nodes.

    Names that do not exist in Slurm are left out of the result.

    Raises:
        HoldfastError: Slurm does not answer.
    """
    wanted = [",".join(sorted(names))] if names else []
    try:
        output = command(["scontrol", "--oneliner", "show", "node", *wanted])
    except HoldfastError as error:
        if not names or "not found" not in str(error):
            raise
        output = command(["scontrol", "--oneliner", "show", "node"])  # one unknown name hides all
    found = parse_nodes(output)
    return {name: node for name, node in found.items() if not names or name in names}


def parse_nodes(output: str) -> dict[str, SlurmNode]:
    """Parse the output of `scontrol --oneliner show node`; return the nodes by name."""
    nodes = (_parse(line) for line in output.splitlines())
    return {node.name: node for node in nodes if node is not None}


def _parse(line: str) -> SlurmNode | None:
    name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
    if name is None or state is None:
        return None
    words = set()
    for word in state[1].upper().split("+"):
        words.add(word.rstrip("".join(_FLAGS) + "#!-"))
        words.update(_FLAGS[sign] for sign in _FLAGS if sign in word)
    # The reason is free text, which ends before one of these fields or at the end of the line.
    reason = re.search(r"\bReason=(.*?)(?=\s(?:Comment|Extra|ReservationName)=|$)", line)
    stated = "" if reason is None else reason[1].strip()
    by = _SET_BY.fullmatch(stated)
    reservation = re.search(r"\bReservationName=(\S+)", line)
    return SlurmNode(
        name=name[1],
        states=frozenset(words - {""}),
        reason=stated if by is None else by["reason"],
        set_by="" if by is None else by["user"],
        reservation="" if reservation is None else reservation[1],
    )
