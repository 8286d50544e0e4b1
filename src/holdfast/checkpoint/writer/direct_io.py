"""Write files at the disk's own speed, by direct I/O with several writes at once.

While the disk writes, the memory that was already written is digested: each block for later
readers, and each piece of a saved tensor for the attestation. Because the digests are taken after
the write, they include any change of the memory before the write, so the attestation detects the
change before the commit. This module needs no torch.
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
"""Two threads keep a disk of 4 GB/s busy; the others work while one waits for data or the GIL."""


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    """Hold the digests of a written file's blocks and of the requested pieces, 8 bytes each."""

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

    If the file exists, its content is replaced.

    Args:
        path: the path of the file.
        data: page-aligned memory, as long as `size_bytes` or up to the next multiple of 4096.
        size_bytes: the size of the file.
        pieces: byte ranges to digest separately, in order; offsets count from the start of `data`.
        pace: the limit on the write rate; None for no limit.
        await_bytes: called with a number N before the first N bytes of `data` are read; returns
            once these bytes are there.
        progress: called after each written chunk with its size in bytes.

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
    """Reserve disk space for the whole file, so that a full disk is detected before any write.

    On a file system without fallocate, nothing is reserved. There, posix_fallocate would write one
    byte into each block, which on NFS takes a request for each block.
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
