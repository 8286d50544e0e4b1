"""Find the control groups (cgroups(7), version 1 and 2) that limit this process."""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """One control group that contains this process.

    Attributes:
        folder: the folder with the files of the group.
        version: the version of the control group interface, 1 or 2.
        is_own: True for the process's own group, False for a group above it.
    """

    folder: Path
    version: int
    is_own: bool


def control_groups(controller: str, root: Path = Path("/")) -> tuple[ControlGroup, ...]:
    """Return the mounted control groups of this process, from its own group up to the topmost.

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
    """Return the control groups that `own`, the content of `/proc/self/cgroup`, names.

    `own` is an argument so that the cached result is not used after the process moved to another
    group.
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
    """Return the mounted group hierarchies of a controller, read from `/proc/self/mountinfo`.

    The key is the mount point. The value is the mounted group's path and the interface's version.
    The format of the file is documented in proc_pid_mountinfo(5).
    """
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
    """Return the path of the group `own` below the mount of the group `mounted`.

    The result is None if the mount does not show the group. In a namespace of control groups, both
    paths are relative to the namespace's root, and each group above the root appears as `..`,
    without a name. So a mount of a group above the root can only be used at its top.
    """
    if own.is_relative_to(mounted):
        inside = own.relative_to(mounted)
        return None if ".." in inside.parts else inside
    return PurePosixPath() if set(mounted.parts[1:]) == {".."} else None


def read_limits(controller: str, name: str, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """Read the file `name` of each control group of this process; skip groups without the file.

    Yields:
        The group's folder and the content of the file.

    Raises:
        OSError: the system has no control groups.
        ValueError: the kernel's files have an undocumented format.
    """
    for group in control_groups(controller, root):
        try:
            yield group.folder, (group.folder / name).read_text().strip()
        except OSError:  # a group without this controller, or the root
            continue
