"""Measure the limits of the machine: memcpy, hash, direct writes and reads."""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpointing import raw
from checkpointing.sizes import Sizes
from common.machine import Quiet
from common.table import Row


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield medians, in GB/s."""
    size_bytes = sizes.limits_bytes
    (folder / "read").mkdir()
    (folder / "read" / "data").write_bytes(
        raw.BLOCK_BYTES * b"\1" * max(1, size_bytes // raw.BLOCK_BYTES)
    )
    source = raw.noise(size_bytes)
    ways: dict[str, Callable[[], float]] = {
        "memcpy, 1 thread": lambda: raw.memcpy_s(size_bytes),
        "xxh3-128, 1 thread": lambda: raw.hash_s(size_bytes),
        "direct write, 2 threads": lambda: raw.write_direct(folder / "written", source),
        "direct read, 2 threads": lambda: _read_s(folder / "read"),
    }
    quiet.wait()
    times_s = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    for name in ways:
        median_s = statistics.median(one[name] for one in times_s)
        yield Row(measure=name, limit=size_bytes / median_s / 1e9, unit="GB/s")


def _read_s(folder: Path) -> float:
    raw.drop_caches(folder)
    return raw.read_direct(folder)[1]
