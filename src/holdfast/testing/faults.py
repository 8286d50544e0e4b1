"""Real faults for tests and demonstrations: what breaks here is really broken."""

import os
import random
import signal
from pathlib import Path


def kill(pid: int) -> None:
    """End a process with SIGKILL, as the kernel's out-of-memory killer does."""
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Stop a process with SIGSTOP: alive, silent, and deaf to SIGTERM."""
    os.kill(pid, signal.SIGSTOP)


def flip_bit(path: Path, random_source: random.Random) -> tuple[int, int]:
    """Flip one bit of a file, durably; returns the byte's offset and the bit's number."""
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
