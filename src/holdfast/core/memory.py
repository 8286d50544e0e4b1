"""Measure how much memory this process can still take."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil

_UNLIMITED_BYTES: Final = 1 << 62
"""Version 1 of control groups states "no limit" as 2^63 less a page."""


class _Version(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache_of: str
    """The prefix of `active_file` in `memory.stat`, for the sum of a group and all groups below."""


_V2: Final = _Version(("memory.max", "memory.high"), "memory.current", "")
_V1: Final = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes left on the node or in this process's control groups, whichever are fewer.

    All mounted groups count, from the process's own group up to the topmost, in version 1 and 2 of
    cgroups(7). A container cannot see the groups above its own; only version 1 states their limit.

    Args:
        root: the folder that holds `proc` and the mount points.
    """
    return max(0, min(psutil.virtual_memory().available, *_left_bytes(root), _UNLIMITED_BYTES))


def _left_bytes(root: Path) -> Iterator[int]:
    try:
        own = os.fsdecode((root / "proc/self/cgroup").read_bytes())
        groups = _groups(root, own)
    except (OSError, ValueError):  # not Linux, or an undocumented format
        return
    for version, folder, is_own in groups:
        limit_bytes = min(_limit_bytes(folder / name) for name in version.limits)
        if limit_bytes >= _UNLIMITED_BYTES and not (is_own and version is _V1):
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


@functools.lru_cache(maxsize=8)
def _groups(root: Path, own: str) -> tuple[tuple[_Version, Path, bool], ...]:
    """Return the folders of the groups that limit a process, each with True for its own group.

    Args:
        root: the root of the file system.
        own: the content of `/proc/self/cgroup`, which changes when the process moves to another
            group.
    """
    paths: dict[_Version, PurePosixPath] = {}
    for line in own.splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[_V1 if controllers else _V2] = PurePosixPath(path)
    found = []
    for point, (mounted, version) in _mounts(root).items():
        inside = _inside(mounted, paths[version]) if version in paths else None
        if inside is not None:
            folder = root / point.lstrip("/")
            found += [
                (version, folder / each, each == inside) for each in (inside, *inside.parents)
            ]
    return tuple(found)


def _mounts(root: Path) -> dict[str, tuple[PurePosixPath, _Version]]:
    """Return the mounted hierarchies that limit memory, by mount point: proc_pid_mountinfo(5)."""
    mounts: dict[str, tuple[PurePosixPath, _Version]] = {}
    for line in os.fsdecode((root / "proc/self/mountinfo").read_bytes()).splitlines():
        before, _, after = line.partition(" - ")
        mounted, point = (
            re.sub(r"\\([0-7]{3})", lambda at: chr(int(at[1], 8)), each)
            for each in before.split()[3:5]
        )
        kind, *_source, options = after.split()
        mounts.pop(point, None)  # the later mount hides the earlier one
        if kind == "cgroup2":
            mounts[point] = PurePosixPath(mounted), _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts[point] = PurePosixPath(mounted), _V1
    return mounts


def _inside(mounted: PurePosixPath, own: PurePosixPath) -> PurePosixPath | None:
    """Return a group's path below the mount of `mounted`; None if the mount does not show it.

    In a namespace of control groups, both paths are relative to the namespace's root, and each
    group above the root appears as `..`, without a name. So only the top of such a mount counts.
    """
    if own.is_relative_to(mounted):
        inside = own.relative_to(mounted)
        return None if ".." in inside.parts else inside
    return PurePosixPath() if set(mounted.parts[1:]) == {".."} else None
