"""Measure how much more memory this process can use."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.core.control_groups import control_groups

_UNLIMITED_BYTES: Final = 1 << 62
"""A limit of at least this means no limit; cgroups version 1 writes it as 2^63 minus a page."""


class _Version(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache_of: str
    """The prefix of the fields of `memory.stat` that include all groups below a group."""


_VERSIONS: Final = {
    1: _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    2: _Version(("memory.max", "memory.high"), "memory.current", ""),
}


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still use, in bytes.

    The result is the least of the free memory of the node and of each control group that contains
    the process. All mounted groups count, from the process's own group up to the topmost, in
    version 1 and 2 of cgroups(7). A container cannot see the groups above its own; only version 1
    states their limit.

    Args:
        root: the folder that holds `proc` and the mount points.
    """
    # Not at the top: the process that writes checkpoints imports this module and seldom calls this
    # function. The import of psutil would take a tenth of the time in which that process starts.
    import psutil

    return max(0, min(psutil.virtual_memory().available, *_left_bytes(root), _UNLIMITED_BYTES))


def _left_bytes(root: Path) -> Iterator[int]:
    try:
        groups = control_groups("memory", root)
    except (OSError, ValueError):  # not Linux, or an undocumented format
        return
    for folder, number, is_own in groups:
        version = _VERSIONS[number]
        limit_bytes = min(_limit_bytes(folder / name) for name in version.limits)
        if limit_bytes >= _UNLIMITED_BYTES and not (is_own and number == 1):
            continue
        of = _statistics(folder / "memory.stat")
        # The least limit of this group and the groups above, some of which a container cannot see.
        limit_bytes = min(limit_bytes, of.get("hierarchical_memory_limit", _UNLIMITED_BYTES))
        with contextlib.suppress(OSError, ValueError):  # the group has no memory controller
            left_bytes = limit_bytes - int((folder / version.used).read_text())
            # The page cache counts as used, but the kernel frees the cache when memory is needed.
            yield left_bytes + sum(
                of.get(f"{version.cache_of}{kind}_file", 0) for kind in ("active", "inactive")
            )


def _limit_bytes(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the root, or a group without this controller; or "max"
        return _UNLIMITED_BYTES


def _statistics(path: Path) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
