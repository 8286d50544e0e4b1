"""Who may change a checkpoint's marks, or delete it for want of them: one process at a time.

A lock on an empty file in the checkpoint's folder (network file systems lock files where they lock no folders), which
the kernel lets go of when its process dies.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import CheckpointError, NotFound

LOCK_NAME = ".holdfast-marks.lock"
WAIT_S = 10.0
"""Whoever holds the lock writes one small file, or renames one folder and deletes it."""
_POLL_S = 0.01
_logger = logging.getLogger("holdfast")


@contextmanager
def locked(checkpoint: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a checkpoint, which is there and has its name once the block begins.

    Raises:
        NotFound: the checkpoint is gone.
        CheckpointError: another process has held the lock for `wait_s` seconds.
        OSError: the folder cannot be written.
    """
    path = checkpoint / LOCK_NAME
    deadline_s = time.monotonic() + wait_s
    while True:
        fd = _open(path)
        try:
            _lock(fd, checkpoint, deadline_s, wait_s)
            # The one who had it before may have deleted the checkpoint, or saved its step again.
            if _is_at(fd, path):
                yield
                return
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"There is no checkpoint {path.parent} (any more). `holdfast checkpoint ls` lists those there are."
        ) from error


def _lock(fd: int, checkpoint: Path, deadline_s: float, wait_s: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise CheckpointError(
                    f"Another process has held the marks of {checkpoint} for {wait_s:.0f} s. See who has "
                    f"{LOCK_NAME} open there (`fuser`), and try again."
                ) from error
            time.sleep(_POLL_S)
        except (
            OSError
        ) as error:  # a file system without locks; the write itself is still whole or absent
            _logger.debug("no lock on %s: %s", checkpoint, error)
            return
        else:
            return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
