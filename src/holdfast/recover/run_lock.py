"""Lock a run's folder while the run is alive.

The supervisor and the guard, which inherits the lock, hold it. The kernel releases the lock when
both are gone. So unlike with a file that contains a process id, another process cannot be mistaken
for the run, and no stale file must be removed. The folder must be on a disk of this host.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Self

from holdfast.core.errors import BadUse

POLL_S = 0.05


class RunLock:
    """A lock that is held from `acquire` until `release`, and by all processes that inherit `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float = 1.0) -> Self:
        """Take the lock; wait up to `timeout_s` for the processes of a dead supervisor to end.

        The default is long enough if another process calls `is_alive`, which holds the lock only
        for an instant.

        Raises:
            BadUse: another supervisor holds the lock.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline_s:
                    time.sleep(POLL_S)
                    continue
                os.close(fd)
                raise BadUse(
                    f"Run {path.parent.name} is still going. `holdfast logs {path.parent.name} -f` follows it, "
                    f"`holdfast runs stop {path.parent.name}` stops it."
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            return cls(fd)

    def release(self) -> None:
        """Release the lock. If a process that inherited the lock is still alive, it stays locked."""
        os.close(self.fd)


def holder_pid(path: Path) -> int | None:
    """Return the process id of the last holder of the lock; None if it cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def is_alive(path: Path) -> bool:
    """Return True if a process holds the lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
