"""Cause real faults for tests and demonstrations: dead processes, damaged files, full disks."""

import os
import random
import signal
from pathlib import Path

from holdfast.core.errors import BadUse

DISK_LIMIT_BYTES = 16 * 2**30
"""The largest file system that `fill_disk` fills; a larger one probably has other users."""
_PIECE_BYTES = 2**20


def kill(pid: int) -> None:
    """Kill a process with SIGKILL, as the kernel's out-of-memory killer does."""
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Stop a process with SIGSTOP; the process stays alive, but does not react to SIGTERM."""
    os.kill(pid, signal.SIGSTOP)


def flip_bit(path: Path, random_source: random.Random) -> tuple[int, int]:
    """Flip one bit of a file, durably; return the byte's offset and the bit's number."""
    with path.open("r+b") as file:
        offset = random_source.randrange(os.fstat(file.fileno()).st_size)
        bit = random_source.randrange(8)
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
        file.flush()
        os.fsync(file.fileno())
    return offset, bit


def truncate(path: Path, random_source: random.Random) -> int:
    """Cut a file off at a random byte, durably; return the number of bytes that remain."""
    with path.open("r+b") as file:
        left_bytes = random_source.randrange(os.fstat(file.fileno()).st_size)
        file.truncate(left_bytes)
        os.fsync(file.fileno())
    return left_bytes


def fill_disk(filler: Path) -> int:
    """Write a file until its file system is full; return the size of the file in bytes.

    Deleting the file ends the fault.

    Raises:
        BadUse: the file system is larger than `DISK_LIMIT_BYTES`. Nothing was written.
    """
    found = os.statvfs(filler.parent)
    size_bytes = found.f_frsize * found.f_blocks
    if size_bytes > DISK_LIMIT_BYTES:
        raise BadUse(
            f"The file system of {filler.parent} has {size_bytes / 2**30:.0f} GiB, and other users may need it: it is "
            f"not filled. Put the checkpoints on one of at most {DISK_LIMIT_BYTES / 2**30:.0f} GiB, such as a tmpfs."
        )
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    piece_bytes = _PIECE_BYTES
    try:
        while piece_bytes:
            try:
                os.write(descriptor, bytes(piece_bytes))
            except OSError:  # full, or nearly
                piece_bytes //= 2
        return os.fstat(descriptor).st_size
    except BaseException:  # Ctrl-C: no other code deletes the file
        filler.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
