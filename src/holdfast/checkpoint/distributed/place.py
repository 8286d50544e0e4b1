"""Identify the node and the failure domain in which a process runs."""

import os
from pathlib import Path
from typing import Final, NamedTuple


class Place(NamedTuple):
    """The node and the failure domain of a rank; without `domain`, the node is its own domain."""

    node: str
    domain: str = ""


ENV_NODE: Final = "HOLDFAST_NODE"
"""Environment variable: the node's name, in place of the kernel's boot id."""


ENV_FAILURE_DOMAIN: Final = "HOLDFAST_FAILURE_DOMAIN"
"""Environment variable: the label of the nodes that share a rack, a switch or a power supply."""


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def own_place() -> Place:
    """Return the place of this process.

    A node is one running kernel, whose memory is lost at once. Containers on one machine are
    therefore one node. Machines that are all named `localhost` are several nodes.
    """
    node = os.environ.get(ENV_NODE) or _BOOT_ID.read_text().strip()
    return Place(node, os.environ.get(ENV_FAILURE_DOMAIN, ""))
