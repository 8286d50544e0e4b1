"""Memory of a node that its processes take at the same time, and not more of it than there is.

What is free is looked at, and then taken, which lasts seconds; all ranks of a node do so at once. Whoever is about to
take some says so by the name of a file that it holds locked, and the system unlocks what the dead held.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.core.memory import available_memory_bytes

_logger = logging.getLogger("holdfast")
_SHARED: Final = Path(
    "/dev/shm"
)  # what all processes of a node see, and what is gone when it starts
_PATIENCE_S: Final = 120.0
"""A hundred gigabytes take a minute."""
_LOOK_EVERY_S: Final = 0.02


@contextlib.contextmanager
def reserved(size_bytes: int, *, patience_s: float = _PATIENCE_S) -> Iterator[int]:
    """While this is open, so much counts as taken for whoever else of this user asks here.

    Gives how many bytes are free, without what others are taking; where that is too little, once they have taken it, or
    after `patience_s`.
    """
    with contextlib.ExitStack() as held:
        try:
            free_bytes = _reserve(size_bytes, held, patience_s)
        except OSError as error:  # nobody may write there
            _logger.debug("what others are taking of the memory is not known: %s", error)
            free_bytes = available_memory_bytes()
        yield free_bytes


def _reserve(size_bytes: int, held: contextlib.ExitStack, patience_s: float) -> int:
    prefix = f"holdfast-taking.{os.getuid()}"
    until_s = time.monotonic() + patience_s
    while True:
        is_over = time.monotonic() > until_s
        try:
            with _locked(_SHARED / prefix):  # so that one looks at a time
                taking_bytes = sum(map(_taking_bytes, _SHARED.glob(f"{prefix}.*")))
                free_bytes = available_memory_bytes() - taking_bytes
                if size_bytes <= free_bytes or not taking_bytes or is_over:
                    own = _SHARED / f"{prefix}.{secrets.token_hex(4)}.{size_bytes}"
                    held.enter_context(_locked(own))
                    held.callback(own.unlink, missing_ok=True)
                    return free_bytes
        except BlockingIOError:
            if is_over:
                raise
        time.sleep(_LOOK_EVERY_S)


def _taking_bytes(path: Path) -> int:
    """What whoever holds this file is taking; a dead one nothing."""
    try:
        with _locked(path, os.O_RDWR):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return int(path.suffix[1:])
    except OSError:  # it has the memory now; or it is somebody else's file
        pass
    return 0


@contextlib.contextmanager
def _locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[None]:
    """Raises BlockingIOError where somebody else has it."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
    finally:
        os.close(fd)
