"""Write files at the disk's own speed: direct I/O, several writes at once, digests meanwhile.

Digests are taken of the memory that was handed to the disk: of each block for readers, and of each
saved piece for the attestation. They are taken after the write. A change of the memory before the
write is therefore in the digests, and the attestation detects it before the commit. This module
needs no torch.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from holdfast.checkpoint.format.checksums import DIGEST_BYTES, digests_of
from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES, Piece
from holdfast.core.rate_limit import RateLimit

_libc: Final = ctypes.CDLL(None, use_errno=True)
_SECTOR_BYTES: Final = 4096
_THREADS: Final = 4
"""Two threads keep a disk of 4 GB/s busy; the others cover waits for the copy or the GIL."""


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    """The digests of a durable file, 8 bytes each: of its blocks, and of the requested pieces."""

    blocks: bytes
    pieces: bytes


def write_file(
    path: Path,
    data: memoryview,
    size_bytes: int,
    pieces: Sequence[Piece] = (),
    *,
    pace: RateLimit | None = None,
    await_bytes: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
) -> FileDigests:
    """Write the first `size_bytes` of `data` to the file `path`, and make the file durable.

    A former content is lost.

    Args:
        path: the file.
        data: page-aligned memory, as long as `size_bytes` or up to the next multiple of 4096.
        size_bytes: the size of the file.
        pieces: parts of the file to digest separately, in order; offsets count from the start of
            `data`.
        pace: the limit to the rate.
        await_bytes: called before the first N bytes of `data` are read, with N; returns once they
            are copied.
        progress: called with the size of each written chunk.

    Raises:
        OSError: the write failed; the file is left incomplete.
    """
    padded = -(-size_bytes // _SECTOR_BYTES) * _SECTOR_BYTES
    in_chunk: dict[int, list[Piece]] = {}
    for piece in pieces:
        in_chunk.setdefault(piece.offset // CHUNK_BYTES, []).append(piece)
    limit = pace or RateLimit(None)
    fd = _open(path)

    def write(at: int) -> tuple[int, int]:
        end = min(at + CHUNK_BYTES, size_bytes)
        await_bytes(end)
        limit.wait(end - at)
        _write_all(fd, data[at : min(at + CHUNK_BYTES, padded)], at)
        progress(end - at)
        return at, end

    blocks, hashed = [], []
    try:
        _reserve(fd, padded)
        with ThreadPoolExecutor(_THREADS) as pool:
            for at, end in pool.map(write, range(0, size_bytes, CHUNK_BYTES)):
                blocks.append(digests_of(data[at:end]))
                hashed.append(piece_digests(data, in_chunk.get(at // CHUNK_BYTES, ())))
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileDigests(blocks=b"".join(blocks), pieces=b"".join(hashed))


def piece_digests(data: memoryview, pieces: Sequence[Piece]) -> bytes:
    """Return the XXH3-64 digest of each piece of `data`, 8 bytes each, little-endian."""
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(data[at : at + length]).to_bytes(DIGEST_BYTES, "little") for at, length in pieces
    )


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # tmpfs and some network file systems lack direct I/O
            raise
    return os.open(path, flags, 0o666)


def _reserve(fd: int, size_bytes: int) -> None:
    """Reserve the space of the file, so that a full disk fails before any write.

    A file system without fallocate is left alone: posix_fallocate would write a byte into each
    block, on NFS one request each.
    """
    while size_bytes and _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        if count < len(data):  # direct I/O continues at the start of a sector
            count -= count % _SECTOR_BYTES
        if count <= 0:
            raise OSError(errno.EIO, "The disk takes nothing")
        data, at = data[count:], at + count
