"""Find the control groups that limit this process, in version 1 and 2 of cgroups(7)."""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """One control group with limits for this process.

    Attributes:
        folder: the folder with the files of the group.
        version: 1 or 2.
        is_own: True for the process's own group, False for a group above.
    """

    folder: Path
    version: int
    is_own: bool


def control_groups(controller: str, root: Path = Path("/")) -> tuple[ControlGroup, ...]:
    """Return the mounted groups of this process, from its own group up to the topmost.

    A container cannot see the groups above its own.

    Args:
        controller: the name of the controller, such as "memory".
        root: the folder that holds `proc` and the mount points.

    Raises:
        OSError: the system has no control groups.
        ValueError: the kernel's files have an undocumented format.
    """
    own = os.fsdecode((root / "proc/self/cgroup").read_bytes())
    return _groups(root, own, controller)


@functools.lru_cache(maxsize=8)
def _groups(root: Path, own: str, controller: str) -> tuple[ControlGroup, ...]:
    """Return the groups; `own` is the content of `/proc/self/cgroup`.

    The content changes when the process moves to another group.
    """
    paths: dict[int, PurePosixPath] = {}
    for line in own.splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            paths[1 if controllers else 2] = PurePosixPath(path)
    found = []
    for point, (mounted, version) in _mounts(root, controller).items():
        inside = _inside(mounted, paths[version]) if version in paths else None
        if inside is not None:
            folder = root / point.lstrip("/")
            found += [
                ControlGroup(folder / each, version, each == inside)
                for each in (inside, *inside.parents)
            ]
    return tuple(found)


def _mounts(root: Path, controller: str) -> dict[str, tuple[PurePosixPath, int]]:
    """Return the mounted hierarchies of a controller, by mount point: proc_pid_mountinfo(5)."""
    mounts: dict[str, tuple[PurePosixPath, int]] = {}
    for line in os.fsdecode((root / "proc/self/mountinfo").read_bytes()).splitlines():
        before, _, after = line.partition(" - ")
        mounted, point = (
            re.sub(r"\\([0-7]{3})", lambda at: chr(int(at[1], 8)), each)
            for each in before.split()[3:5]
        )
        kind, *_source, options = after.split()
        mounts.pop(point, None)  # the later mount hides the earlier one
        if kind == "cgroup2":
            mounts[point] = PurePosixPath(mounted), 2
        elif kind == "cgroup" and controller in options.split(","):
            mounts[point] = PurePosixPath(mounted), 1
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


def read_limits(controller: str, name: str, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """Yield the content of a file of each group that has the file, with the group's folder.

    Raises:
        OSError: the system has no control groups.
        ValueError: the kernel's files have an undocumented format.
    """
    for group in control_groups(controller, root):
        try:
            yield group.folder, (group.folder / name).read_text().strip()
        except OSError:  # a group without this controller, or the root
            continue
