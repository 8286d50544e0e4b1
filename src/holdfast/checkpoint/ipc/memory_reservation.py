"""Reserve memory of a node, so that its processes together allocate no more than is free.

All ranks of a node allocate large buffers at the same time, and each allocation takes seconds. A
process that is about to allocate locks a file whose name contains the size, so other processes can
subtract that size from the free memory. The kernel releases the locks of dead processes.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.core.memory import available_memory_bytes

_logger = logging.getLogger("holdfast")
# All processes of a node share this folder, and a reboot empties it.
_SHARED: Final = Path("/dev/shm")
_PATIENCE_S: Final = 120.0
"""Seconds to wait for other processes, since allocating a hundred gigabytes takes a minute."""
_LOOK_EVERY_S: Final = 0.02


@contextlib.contextmanager
def reserved(size_bytes: int, *, patience_s: float = _PATIENCE_S) -> Iterator[int]:
    """Reserve `size_bytes` of the node's memory inside the `with` block.

    Only processes of the same user see the reservation. If too few bytes are free, this function
    first waits until the other processes have allocated their reserved memory, but no longer than
    `patience_s` seconds.

    Yields:
        The free bytes, less the reservations of other processes.
    """
    with contextlib.ExitStack() as held:
        try:
            free_bytes = _reserve(size_bytes, held, patience_s)
        except OSError as error:  # the folder is not writable
            _logger.debug("the memory reservations of other processes cannot be read: %s", error)
            free_bytes = available_memory_bytes()
        yield free_bytes


def _reserve(size_bytes: int, held: contextlib.ExitStack, patience_s: float) -> int:
    prefix = f"holdfast-taking.{os.getuid()}"
    until_s = time.monotonic() + patience_s
    while True:
        is_over = time.monotonic() > until_s
        try:
            with _locked(_SHARED / prefix):  # one process checks at a time
                taking_bytes = sum(map(_taking_bytes, _SHARED.glob(f"{prefix}.*")))
                free_bytes = available_memory_bytes() - taking_bytes
                if size_bytes <= free_bytes or not taking_bytes or is_over:
                    own = _SHARED / f"{prefix}.{os.urandom(4).hex()}.{size_bytes}"
                    held.enter_context(_locked(own))
                    held.callback(own.unlink, missing_ok=True)
                    return free_bytes
        except BlockingIOError:
            if is_over:
                raise
        time.sleep(_LOOK_EVERY_S)


def _taking_bytes(path: Path) -> int:
    """Return the bytes that the owner of a reservation file is allocating; 0 if it has ended.

    The file of a dead owner is deleted.
    """
    try:
        with _locked(path, os.O_RDWR):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return int(path.suffix[1:])
    except OSError:  # the owner has allocated its memory; or the file is another user's
        pass
    return 0


@contextlib.contextmanager
def _locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[None]:
    """Lock the file at `path` inside the block; raise BlockingIOError if it is locked already."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            # Unlock explicitly: a forked child keeps the file open, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
