"""Files at the disk's own speed: past the page cache, several writes at once, hashed while the next bytes pass.

What is hashed is the memory that was handed to the disk: each block for whoever reads the file, and the pieces of what
was saved for the attestation. It is hashed after it was written: whatever changes it before is in the digests, and an
attestation finds it before there is a checkpoint. Nothing here needs torch.
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
"""Two would keep a disk that takes 4 GB/s busy, but for those that wait for the copy or for Python's lock."""


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    """A file that is durable: the digests of its blocks, and of the pieces that were asked for, eight bytes each."""

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
    """Write the first `size_bytes` of `data` to the file `path` and make it durable; what was there is gone.

    Args:
        path: the file.
        data: page-aligned memory, as long as `size_bytes` or up to the next multiple of 4096.
        size_bytes: how much of it is the file.
        pieces: parts of it to hash by themselves, offsets from the begin of `data`, in their order.
        pace: a limit to the rate.
        await_bytes: called before so many bytes of `data` are read; returns once they are there.
        progress: told the bytes of each chunk that is written.

    Raises:
        OSError: it could not be written; the file is left as it is.
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
    """The XXH3-64 of each piece of `data`, eight bytes each, little-endian."""
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(data[at : at + length]).to_bytes(DIGEST_BYTES, "little") for at, length in pieces
    )


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # tmpfs and some network file systems know no direct I/O
            raise
    return os.open(path, flags, 0o666)


def _reserve(fd: int, size_bytes: int) -> None:
    """Take the space now: a full disk is known before anything is written.

    Where the file system cannot, it is left: posix_fallocate would write a byte into each block, on NFS each at once.
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
        if count < len(data):  # direct I/O goes on at a sector's begin
            count -= count % _SECTOR_BYTES
        if count <= 0:
            raise OSError(errno.EIO, "The disk takes nothing")
        data, at = data[count:], at + count
