"""Compute and check checksums of files block by block, so that any part can be verified.

A data file `NAME` has a sidecar `NAME.xxh3`, which holds the digest of each block: its XXH3-64,
eight bytes, little-endian. The checksum of the whole file is the XXH3-128 of the sidecar's content.
The checksums detect damage, but not forgery.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

BLOCK_BYTES: Final = 1 << 16
"""The block size in bytes. To verify a part of a file, a reader reads up to this many bytes more at
each end of the part.
"""
SIDECAR_SUFFIX: Final = ".xxh3"
DIGEST_BYTES: Final = 8
_CHUNK_BYTES: Final = 4 << 20
_THREADS: Final = min(4, os.cpu_count() or 1)
_WHOLE: Final = "xxh3_128:"
_BLOCKS: Final = f"xxh3_128/{BLOCK_BYTES}:"


def digests_of(data: memoryview) -> bytes:
    """Return the digests of the blocks of `data`, in the form of a sidecar.

    The last block may be shorter.
    """
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(data[at : at + BLOCK_BYTES]).to_bytes(DIGEST_BYTES, "little")
        for at in range(0, len(data), BLOCK_BYTES)
    )


def checksum_of_digests(digests: bytes) -> str:
    """Return the checksum of a file from the digests of its blocks."""
    return _BLOCKS + xxhash.xxh3_128_hexdigest(digests)


def has_blocks(checksum: str) -> bool:
    """Return True if a checksum is made of block digests."""
    return checksum.startswith(_BLOCKS)


def whole_checksum(hexdigest: str) -> str:
    """Return the checksum of a file from the XXH3-128 of its whole content."""
    return _WHOLE + hexdigest


def file_digests(
    path: Path, size_bytes: int, progress: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read a file, and return the digests of its blocks.

    `progress` is called in several threads, with the number of bytes read.

    Raises:
        OSError: the file cannot be read.
        EOFError: the file is shorter than `size_bytes`.
    """

    def read(at: int) -> bytes:
        count = min(_CHUNK_BYTES, size_bytes - at)
        data = memoryview(bytearray(count))
        if read_into(fd, data, at) < count:
            raise EOFError
        progress(count)
        return digests_of(data)

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return b"".join(pool.map(read, range(0, size_bytes, _CHUNK_BYTES)))
    finally:
        os.close(fd)


def read_into(fd: int, data: memoryview, at: int, least: int | None = None) -> int:
    """Fill `data` with the bytes of a file from offset `at` on.

    Stop early once `least` bytes are read, if `least` is given.

    Returns:
        The number of bytes read. It is less than requested only at the end of the file.

    Raises:
        OSError: the file cannot be read.
    """
    filled = 0
    enough = len(data) if least is None else least
    while filled < enough and (count := os.preadv(fd, [data[filled:]], at + filled)):
        filled += count
    return filled


def check_file(
    path: Path, size_bytes: int, checksum: str, progress: Callable[[int], None] = lambda _: None
) -> bool:
    """Read a file, and return True if its bytes match `checksum`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the form of `checksum` is unknown.
    """
    if checksum.startswith(_BLOCKS):
        try:
            return checksum_of_digests(file_digests(path, size_bytes, progress)) == checksum
        except EOFError:
            return False
    if not checksum.startswith(_WHOLE):
        raise ValueError(f"unknown kind of checksum: {checksum!r}")
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
            progress(len(chunk))
    return whole_checksum(found.hexdigest()) == checksum


def write_sidecar(path: Path, digests: bytes) -> None:
    """Write the digests of a file's blocks beside the file.

    On return, the content of the sidecar is durable. Its name becomes durable when the folder is
    synced.

    Raises:
        OSError: the digests were not written.
    """
    with path.with_name(path.name + SIDECAR_SUFFIX).open("wb") as sidecar:
        sidecar.write(digests)
        sidecar.flush()
        os.fsync(sidecar.fileno())


def read_sidecar(path: Path, checksum: str) -> bytes | None:
    """Return the digests of a file's blocks if its sidecar matches `checksum`, else None."""
    try:
        digests = path.with_name(path.name + SIDECAR_SUFFIX).read_bytes()
    except OSError:
        return None
    return digests if checksum_of_digests(digests) == checksum else None
