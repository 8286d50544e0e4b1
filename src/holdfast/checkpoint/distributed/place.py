"""Identify the node and the failure domain in which a process runs."""

import os
from pathlib import Path
from typing import Final, NamedTuple


class Place(NamedTuple):
    """Name the node and the failure domain of a rank; "" means that the node is its own domain."""

    node: str
    domain: str = ""


ENV_NODE: Final = "HOLDFAST_NODE"
"""The environment variable that names the node; without it, the kernel's boot id is used."""


ENV_FAILURE_DOMAIN: Final = "HOLDFAST_FAILURE_DOMAIN"
"""The environment variable that labels nodes which share a rack, a switch or a power supply."""


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def own_place() -> Place:
    """Return the node and the failure domain of this process.

    A node is one running kernel, because its whole memory is lost when it crashes. Containers on
    one machine are therefore one node. Two machines are two nodes, even if both have the host name
    `localhost`.
    """
    node = os.environ.get(ENV_NODE) or _BOOT_ID.read_text().strip()
    return Place(node, os.environ.get(ENV_FAILURE_DOMAIN, ""))
