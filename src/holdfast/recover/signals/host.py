"""Read the file systems, the memory, the clock and the planned shutdown of a node."""

import ctypes
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.recover.signals.facts import CannotSee, Fact, NodeSignal, Notice

LOCAL: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
)
"""The types of file systems that are read. Network file systems are not, since they may block the
reading process.
"""
FULL_SHARE = 0.01
FULL_BYTES = 1024**3
"""A file system counts as full if less than this share and less than this size are free."""
JUMP_S = 1.0
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of linux/timex.h


class FileSystems:
    """The local file systems of this node."""

    name = "the file systems"
    period_s = 10.0

    def __init__(
        self,
        mounts: Path = Path("/proc/self/mountinfo"),
        free: Callable[[str], tuple[int, int]] | None = None,
    ) -> None:
        """Store what `read` needs.

        Args:
            mounts: the mounts, in the form of /proc/self/mountinfo.
            free: a function that returns the number of free bytes, and of all bytes, of a mount
                point.
        """
        self._mounts = mounts
        self._free = free or _free
        self._were_writable: set[str] = set()

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        try:
            lines = self._mounts.read_text(errors="replace").splitlines()
        except OSError as error:
            raise CannotSee(f"{self._mounts}: {error.strerror}") from error
        facts: list[Fact] = []
        seen: dict[str, str] = {}
        for line in lines:
            words = line.split()
            dash = words.index("-") if "-" in words else len(words)
            if len(words) < dash + 4 or words[dash + 1] not in LOCAL:
                continue
            # The state of the device counts, since a read-only mount of a writable device is
            # intended.
            seen.setdefault(words[2], words[4])
            if "ro" not in words[dash + 3].split(","):
                self._were_writable.add(words[2])
            elif words[2] in self._were_writable and seen[words[2]] == words[4]:
                facts.append(self._signal("disk-read-only", words[4], "became read-only"))
        for device, point in seen.items():
            if device in self._were_writable:
                facts += self._full(point)
        return facts

    def _full(self, point: str) -> list[Fact]:
        try:
            free, size = self._free(point)
        except OSError:
            return []
        if size == 0 or free >= min(FULL_BYTES, FULL_SHARE * size):
            return []
        return [self._signal("disk-full", point, "is full")]

    def _signal(self, name: str, point: str, what: str) -> NodeSignal:
        return NodeSignal(source=self.name, name=name, where=point, text=f"{point} {what}")


def _free(point: str) -> tuple[int, int]:
    found = os.statvfs(point)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class Memory:
    """The memory of this node: kills for lack of memory, and errors of memory controllers."""

    name = "the memory"
    period_s = 5.0

    def __init__(
        self,
        vmstat: Path = Path("/proc/vmstat"),
        controllers: Path = Path("/sys/devices/system/edac/mc"),
    ) -> None:
        """Store what `read` needs.

        Args:
            vmstat: the counters of the kernel's memory management.
            controllers: the folder with a folder for each memory controller. It does not exist
                without EDAC.
        """
        self._vmstat = vmstat
        self._controllers = controllers
        self._first: dict[str, int] = {}

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        try:
            text = self._vmstat.read_text(errors="replace")
        except OSError as error:
            raise CannotSee(f"{self._vmstat}: {error.strerror}") from error
        facts: list[Fact] = []
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        kills = 0 if found is None else self._new("oom_kill", int(found[1]))
        if kills > 0:
            facts.append(
                self._signal(
                    "oom-kill", "", f"the kernel killed {kills} processes for memory", kills
                )
            )
        for counter in sorted(self._controllers.glob("mc*/ue_count")):
            where = counter.parent.name
            try:
                errors = self._new(where, int(counter.read_text()))
            except (OSError, ValueError):
                continue
            if errors > 0:
                text = f"{where} counted {errors} uncorrectable errors"
                facts.append(self._signal("memory-uncorrectable", where, text, errors))
        return facts

    def _new(self, name: str, count: int) -> int:
        return count - self._first.setdefault(name, count)

    def _signal(self, name: str, where: str, text: str, count: int) -> NodeSignal:
        return NodeSignal(source=self.name, name=name, where=where, text=text, count=count)


class Clocks:
    """The wall clock of this node: whether it jumps, and whether it is synchronised."""

    name = "the clock"
    period_s = 5.0

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        running_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        status: Callable[[], int | None] | None = None,
    ) -> None:
        """Store what `read` needs.

        Args:
            wall_s: a function that returns the wall-clock time in Unix seconds.
            running_s: a function that returns a monotonic time in seconds, which also advances
                while the machine is suspended.
            status: a function that returns the status of `adjtimex`; None if it cannot be read.
        """
        self._wall_s = wall_s
        self._running_s = running_s
        self._status = status or _status
        self._offset_s: float | None = None
        self._jumps = 0
        self._last_jump_s = 0.0
        self._was_synchronised = False

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        offset_s = self._wall_s() - self._running_s()
        if self._offset_s is not None and abs(offset_s - self._offset_s) > JUMP_S:
            self._jumps, self._last_jump_s = self._jumps + 1, offset_s - self._offset_s
        self._offset_s = offset_s
        facts: list[Fact] = []
        if self._jumps:
            text = f"the clock jumped by {self._last_jump_s:+.1f} s"
            facts.append(
                NodeSignal(source=self.name, name="clock-jump", text=text, count=self._jumps)
            )
        status = self._status()
        if status is not None and not status & _UNSYNCHRONISED:
            self._was_synchronised = True
        elif status is not None and self._was_synchronised:
            text = "the clock is not synchronised any more"
            facts.append(NodeSignal(source=self.name, name="clock-unsynchronised", text=text))
        return facts


def clock_is_synchronised() -> bool | None:
    """Return True if the kernel's clock is synchronised; None if this cannot be read."""
    status = _status()
    return None if status is None else not status & _UNSYNCHRONISED


class _Timex(ctypes.Structure):
    # struct timex of linux/timex.h, up to the status. The rest is space that the kernel fills.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_byte * 256),
    )


def _status() -> int | None:
    """Return the status of the kernel's clock; None if it cannot be read."""
    status = _Timex()  # modes = 0 changes nothing
    try:
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(status))
    except (OSError, AttributeError):
        return None
    return None if code < 0 else int(status.status)


class Shutdown:
    """A shutdown of this node, planned with `shutdown`."""

    name = "planned shutdowns"
    period_s = 5.0

    def __init__(self, path: Path = Path("/run/systemd/shutdown/scheduled")) -> None:
        """Store `path`, the file that exists while systemd has a shutdown planned."""
        self._path = path

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CannotSee(f"{self._path}: {error.strerror}") from error
        fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        moment = fields.get("USEC", "")
        if not moment.isdigit():
            raise CannotSee(f"{self._path} has no valid time")
        what = fields.get("MODE", "shutdown")
        until_s = int(moment) / 1e6
        return [
            Notice(source=self.name, kind="maintenance", text=f"{what} is planned", until_s=until_s)
        ]
