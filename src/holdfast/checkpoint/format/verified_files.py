"""Read parts of a checkpoint's files at the disk's speed, and verify every byte before its use.

Only the blocks that contain the requested parts are read, several at once, with direct I/O. Each
block is compared with its digest in memory, and then copied to the target. This module needs no
torch.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple

from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    check_file,
    checksum_of_digests,
    digests_of,
    file_digests,
    has_blocks,
    read_into,
    read_sidecar,
)
from holdfast.checkpoint.format.manifest import FileEntry, ManifestError

_TASK_BYTES: Final = 8 << 20
_THREADS: Final = 8
"""The number of concurrent reads; on a disk, 4 of 16 MiB or 8 of 4 MiB took up to 10 % longer."""
_COMPARING: Final = max(1, len(os.sched_getaffinity(0)) // 2)
"""The number of concurrent comparisons with digests.

On two cores, two comparisons would slow down the reads by 10 %, because they share the memory
bandwidth.
"""
_HUGE_PAGE_BYTES: Final = 2 << 20
_GAP_BLOCKS: Final = 1
"""The number of unwanted blocks between two wanted ones that are read to avoid a second read."""
Tier = Literal["memory", "peer_memory", "disk"]
"""The source of a checkpoint's files: this node's memory, a peer node's memory, or disk."""


class ByteRange(NamedTuple):
    """Name a file's bytes from `offset` on, and the writable memory that receives them."""

    offset: int
    target: memoryview


class VerifiedFiles:
    """Read and verify the files of one checkpoint.

    Attributes:
        bytes_read: the number of bytes read from the files so far.
        tier: whether the files are read from memory, a peer's memory, or disk.
    """

    tier: Tier = "disk"

    def __init__(self, folder: Path, files: Iterable[FileEntry]) -> None:
        self._folder = folder
        self._entries = {entry.path: entry for entry in files}
        self._digests: dict[str, bytes | None] = {}
        self._buffers = threading.local()
        self._counting = threading.Lock()
        self._comparing = threading.Semaphore(_COMPARING)
        self.bytes_read = 0

    def read(self, name: str, parts: Sequence[ByteRange]) -> None:
        """Read byte ranges of the file `name` into the memory given in `parts`, and verify them.

        Raises:
            ManifestError: a block is damaged, or a range lies outside of the file. Some of the
                memory may already be filled.
            OSError: the file cannot be read.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ManifestError(f"{name} is not in the manifest")
        if any(offset < 0 or offset + len(target) > entry.size_bytes for offset, target in parts):
            raise ManifestError(f"a tensor lies beyond the end of {name}")
        digests = self._digests_of(entry)
        tasks = list(_tasks(sorted(parts, key=lambda part: part.offset), entry.size_bytes))
        fd, origin = self._open(name)
        try:
            if len(tasks) < 2:
                for task in tasks:
                    self._fill(fd, origin, entry, digests, *task)
                return
            with ThreadPoolExecutor(min(_THREADS, len(tasks))) as pool:
                for _ in pool.map(
                    lambda task: self._fill(fd, origin, entry, digests, *task), tasks
                ):
                    pass
        finally:
            os.close(fd)

    def _open(self, name: str) -> tuple[int, int]:
        """Open a file; return the descriptor and the offset at which the file begins there.

        The caller closes the descriptor.
        """
        return _open(self._folder / name), 0

    def _fill(
        self,
        fd: int,
        origin: int,
        entry: FileEntry,
        digests: bytes | None,
        begin: int,
        end: int,
        parts: Sequence[ByteRange],
    ) -> None:
        buffer = self._buffer()
        # Direct I/O reads whole sectors only; the last one ends with the file.
        whole = buffer[: -(-(end - begin) // mmap.PAGESIZE) * mmap.PAGESIZE]
        count = read_into(fd, whole, origin + begin, least=end - begin)
        data = buffer[: end - begin]
        with self._counting:
            self.bytes_read += len(data)
        if count < len(data):
            raise ManifestError(
                f"{entry.path} has {begin + count} bytes instead of {entry.size_bytes}"
            )
        with self._comparing:
            if digests is not None:
                first = begin // BLOCK_BYTES
                right = digests[
                    first * DIGEST_BYTES : (first + -(-len(data) // BLOCK_BYTES)) * DIGEST_BYTES
                ]
                if digests_of(data) != right:
                    raise ManifestError(
                        f"{entry.path} does not match its checksum, in bytes {begin:,} to {end:,}"
                    )
            for offset, target in parts:
                low, high = max(offset, begin), min(offset + len(target), end)
                _copy(target[low - offset : high - offset], data[low - begin : high - begin])

    def _digests_of(self, entry: FileEntry) -> bytes | None:
        """Return the digests of a file's blocks.

        If the manifest has no block digests for the file, the whole file is checked now, and the
        result is None.
        """
        if entry.path not in self._digests:
            self._digests[entry.path] = self._find_digests(entry)
        return self._digests[entry.path]

    def _find_digests(self, entry: FileEntry) -> bytes | None:
        path = self._folder / entry.path
        if has_blocks(entry.checksum):
            digests = read_sidecar(path, entry.checksum)
            if digests is None:  # no valid sidecar: compute the digests from the whole file
                self.bytes_read += entry.size_bytes
                try:
                    digests = file_digests(path, entry.size_bytes)
                except EOFError:
                    digests = b""
                if checksum_of_digests(digests) != entry.checksum:
                    raise ManifestError(f"{entry.path} does not match its checksum")
            return digests
        self.bytes_read += entry.size_bytes
        if not check_file(path, entry.size_bytes, entry.checksum):
            raise ManifestError(f"{entry.path} does not match its checksum")
        return None

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = _huge_pages(_TASK_BYTES)
        memory: memoryview = self._buffers.memory
        return memory


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding Python's lock.

    A memoryview assignment would hold the lock while other threads compute digests.
    """
    if count := len(source):
        char = ctypes.c_char
        ctypes.memmove(
            ctypes.addressof(char.from_buffer(target)),
            ctypes.addressof(char.from_buffer(source)),
            count,
        )


def _tasks(
    parts: Sequence[ByteRange], size_bytes: int
) -> Iterator[tuple[int, int, list[ByteRange]]]:
    """Yield the ranges of whole blocks to read, each with the parts that overlap it.

    A range has at most the size of one task, `_TASK_BYTES`. `parts` must be in the order of their
    offsets.

    Yields:
        The first byte of the range, the byte after its end, and the parts.
    """
    extents: list[list[int]] = []
    for offset, target in parts:
        if not len(target):
            continue
        first, last = offset // BLOCK_BYTES, (offset + len(target) - 1) // BLOCK_BYTES
        if extents and first <= extents[-1][1] + 1 + _GAP_BLOCKS:
            extents[-1][1] = max(extents[-1][1], last)
        else:
            extents.append([first, last])
    offsets = [part.offset for part in parts]
    longest = max((len(part.target) for part in parts), default=0)
    for first, last in extents:
        until = min((last + 1) * BLOCK_BYTES, size_bytes)
        for begin in range(first * BLOCK_BYTES, until, _TASK_BYTES):
            end = min(begin + _TASK_BYTES, until)
            # Parts that start before `begin` may extend beyond it.
            near = parts[bisect_right(offsets, begin - longest) : bisect_right(offsets, end)]
            yield (
                begin,
                end,
                [
                    part
                    for part in near
                    if part.offset < end and part.offset + len(part.target) > begin
                ],
            )


def _huge_pages(size_bytes: int) -> memoryview:
    """Allocate memory, in huge pages if the kernel supports them.

    A request to the disk can name only a limited number of memory pages: half a megabyte of small
    pages, but several megabytes of huge ones. So a disk with a limited number of requests per
    second reads twice as fast into huge pages.
    """
    made = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        made.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(made)) % _HUGE_PAGE_BYTES
    return memoryview(made)[begin : begin + size_bytes]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:  # tmpfs and some network file systems lack direct I/O
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
