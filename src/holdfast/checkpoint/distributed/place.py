"""Identify the node and the failure domain in which a process runs."""

import os
from pathlib import Path
from typing import Final, NamedTuple


class Place(NamedTuple):
    """Where a rank runs; `domain` is empty where nobody has named it: then the node is its own."""

    node: str
    domain: str = ""


ENV_NODE: Final = "HOLDFAST_NODE"
"""What tells a node from the others, where the kernel's word for it will not do."""


ENV_FAILURE_DOMAIN: Final = "HOLDFAST_FAILURE_DOMAIN"
"""What fails together with this node: a rack, a switch, a power supply; the same label on all nodes of it."""


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def own_place() -> Place:
    """Where this process runs.

    A node is what loses its memory at once, and that is one running kernel: containers of one machine are one node,
    whatever they call themselves, and machines that are all called `localhost` are not.
    """
    node = os.environ.get(ENV_NODE) or _BOOT_ID.read_text().strip()
    return Place(node, os.environ.get(ENV_FAILURE_DOMAIN, ""))
