"""Measure disk and memory without checkpoints: direct reads and writes, memcpy, hash."""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import xxhash

BLOCK_BYTES = 16 * 1024 * 1024
THREADS = 2
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024
Item = TypeVar("Item")


def noise(size_bytes: int) -> mmap.mmap:
    """Return incompressible memory of so many bytes, rounded up to a page."""
    pages = mmap.mmap(-1, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
    block = os.urandom(min(BLOCK_BYTES, len(pages)))
    while rest := len(pages) - pages.tell():
        pages.write(block[:rest])
    return pages


def write_direct(path: Path, source: mmap.mmap) -> float:
    """Return the seconds to write memory to a file past the page cache, and fsync.

    Two threads write blocks of 16 MiB; the file's place on the disk is allocated before. `source`
    (from `noise`) is as long as the file: a block that is written repeatedly would come from the
    processor's cache, faster by a sixth.
    """
    size_bytes = len(source)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(handle, 0, size_bytes)
        os.fsync(handle)
        memory = memoryview(source)

        def write(offset: int) -> None:
            block = memory[offset : offset + BLOCK_BYTES]
            if os.pwrite(handle, block, offset) != len(block):
                raise OSError(f"a short write to {path}")

        began_s = time.perf_counter()
        _in_threads(write, range(0, size_bytes, BLOCK_BYTES))
        os.fsync(handle)
        return time.perf_counter() - began_s
    finally:
        os.close(handle)
        path.unlink()


def read_direct(folder: Path, *, huge_pages: bool = False) -> tuple[int, float]:
    """Return the bytes of all files below a folder, and the seconds to read them.

    Two threads read blocks of 16 MiB past the page cache. A disk with a limit of requests a second
    reads faster into huge pages, which allow larger requests.
    """
    sizes = {path: path.stat().st_size for path in _files(folder)}
    handles = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sizes}
    places = [
        (path, offset) for path, size in sizes.items() for offset in range(0, size, BLOCK_BYTES)
    ]
    targets = [
        _in_huge_pages() if huge_pages else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for _ in range(THREADS)
    ]
    for target in targets:
        target[:] = bytes(BLOCK_BYTES)  # has its pages

    def read(place: tuple[Path, int]) -> None:
        target = targets.pop()
        os.preadv(handles[place[0]], [target], place[1])
        targets.append(target)

    try:
        began_s = time.perf_counter()
        _in_threads(read, places)
        return sum(sizes.values()), time.perf_counter() - began_s
    finally:
        for handle in handles.values():
            os.close(handle)


def _in_huge_pages() -> memoryview:
    memory = mmap.mmap(
        -1, BLOCK_BYTES + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    return memoryview(memory)[begin : begin + BLOCK_BYTES]


def drop_caches(folder: Path) -> None:
    """Have the kernel drop the cached pages of all files below a folder."""
    for path in _files(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # what is not on disk yet cannot be forgotten
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def memcpy_s(size_bytes: int) -> float:
    """Return the seconds to copy so many bytes between existing pages, with one thread."""
    source, target = bytes(size_bytes), memoryview(bytearray(size_bytes))

    def copy() -> None:
        target[:] = source

    copy()
    return _seconds(copy)


def hash_s(size_bytes: int) -> float:
    """Return the seconds to hash so many bytes with xxh3-128, block by block, with one thread."""
    block = noise(BLOCK_BYTES)
    return _seconds(
        lambda: [xxhash.xxh3_128_digest(block) for _ in range(size_bytes // BLOCK_BYTES)]
    )


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _in_threads(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(work, items):
            pass


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main() -> None:
    """Write so many bytes to a folder for each input line, and print the seconds."""
    folder, size_bytes = sys.argv[1:]
    source = noise(int(size_bytes))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(write_direct(Path(folder) / "raw", source), flush=True)


if __name__ == "__main__":
    main()
