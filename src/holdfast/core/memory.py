"""How much memory this process may still take."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "memory.stat", "")
_V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_")


def available_memory_bytes(groups: Path = _GROUPS) -> int:
    """What the node has left, or what its control group is allowed, whichever is less.

    A container sees its own group under `groups` (of version 2 or 1); a job in one that is nested deeper sees the node.
    """
    return max(0, min(psutil.virtual_memory().available, *_left_bytes(groups), 1 << 62))


def _left_bytes(groups: Path) -> Iterator[int]:
    for limit, used, statistics, prefix in (_V2, _V1):
        try:
            left = int((groups / limit).read_text()) - int((groups / used).read_text())
            of = dict(line.split() for line in (groups / statistics).read_text().splitlines())
            # The cache of files counts as used, and is given up when the memory is wanted.
            yield left + sum(int(of.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        except (OSError, ValueError):  # no such group, or "max"
            continue
