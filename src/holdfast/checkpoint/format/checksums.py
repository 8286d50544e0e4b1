"""Compute and check checksums of files, block by block, so that any part can be checked alone.

A data file `NAME` has a sidecar `NAME.xxh3`: the XXH3-64 of each block, eight bytes each,
little-endian. The file's own checksum is the XXH3-128 of that list. The checksums detect damage,
not forgery.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

BLOCK_BYTES: Final = 1 << 16
"""The block size in bytes: a reader of a part reads at most this much more at either end.

The digests take 1/8192 of the file's size.
"""
SIDECAR_SUFFIX: Final = ".xxh3"
DIGEST_BYTES: Final = 8
_CHUNK_BYTES: Final = 4 << 20
_THREADS: Final = min(4, os.cpu_count() or 1)
_WHOLE: Final = "xxh3_128:"
_BLOCKS: Final = f"xxh3_128/{BLOCK_BYTES}:"


def digests_of(data: memoryview) -> bytes:
    """Return the XXH3-64 of each block of `data`, as a sidecar holds them.

    The last block may be shorter.
    """
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(data[at : at + BLOCK_BYTES]).to_bytes(DIGEST_BYTES, "little")
        for at in range(0, len(data), BLOCK_BYTES)
    )


def checksum_of_digests(digests: bytes) -> str:
    """Return the checksum of a file whose blocks have `digests`."""
    return _BLOCKS + xxhash.xxh3_128_hexdigest(digests)


def has_blocks(checksum: str) -> bool:
    """Return True if the checksum is made of block digests."""
    return checksum.startswith(_BLOCKS)


def whole_checksum(hexdigest: str) -> str:
    """Return the checksum of a file from the XXH3-128 of all its bytes."""
    return _WHOLE + hexdigest


def file_digests(
    path: Path, size_bytes: int, progress: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read a file, and return the digests of its blocks.

    Several threads call `progress` with the number of bytes read.

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
    """Fill `data`, or at least `least` bytes of it, from offset `at` of a file.

    Returns:
        The number of bytes read; less than requested only at the end of the file.

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
    """Return True if a file's bytes match `checksum`.

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
        raise ValueError(f"no checksum that this Holdfast knows: {checksum!r}")
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
            progress(len(chunk))
    return whole_checksum(found.hexdigest()) == checksum


def write_sidecar(path: Path, digests: bytes) -> None:
    """Write the digests of a file's blocks beside the file.

    The content is durable on return; the name may not be.

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
