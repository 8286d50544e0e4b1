"""Select the newest parts of a recording's files, so that a reader does not run out of memory."""

import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 512 * 1024 * 1024
"""The most bytes to read: about a week of a rank's phases, or 3 days of a node's counters."""
_PART: Final = re.compile(r"\.\d+$")
_FIRST_LINES: Final = 8
"""The number of lines at the start of a part that are searched for a `clock` line."""
_LONGEST_LINE: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The parts of a recording to read.

    Attributes:
        paths: the chosen parts, in the order in which they were passed.
        from_ns: a time in Unix nanoseconds; spans and samples that end earlier are dropped. All
            files then start at the same moment.
        left_out_bytes: the total size of the parts that were not chosen.
    """

    paths: Sequence[Path]
    from_ns: int
    left_out_bytes: int


def newest(paths: Sequence[Path], most_bytes: int) -> Chosen:
    """Choose the newest parts whose total size is at most `most_bytes`, and at least one part."""
    sizes = {path: _size_bytes(path) for path in paths}
    if sum(sizes.values()) <= most_bytes:
        return Chosen(paths=paths, from_ns=0, left_out_bytes=0)
    begins = {path: _begin_ns(path) for path in paths}
    by_age = sorted(paths, key=begins.__getitem__, reverse=True)
    totals = itertools.accumulate(sizes[path] for path in by_age)
    chosen = {
        path
        for number, (path, total) in enumerate(zip(by_age, totals, strict=True))
        if number == 0 or total <= most_bytes
    }
    cut = {_file_of(path) for path in paths if path not in chosen}
    firsts: dict[str, int] = {}
    for path in chosen:
        if (name := _file_of(path)) in cut:
            firsts[name] = min(begins[path], firsts.get(name, begins[path]))
    return Chosen(
        paths=[path for path in paths if path in chosen],
        from_ns=max(firsts.values(), default=0),
        left_out_bytes=sum(size for path, size in sizes.items() if path not in chosen),
    )


def _file_of(path: Path) -> str:
    return _PART.sub("", path.name)


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        return path.stat().st_size
    return 0


def _begin_ns(path: Path) -> int:
    """Return the Unix time in ns at which a part starts; 0 if its first lines are damaged."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        for _ in range(_FIRST_LINES):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                line = json.loads(stream.readline(_LONGEST_LINE))
                if line["kind"] == "clock":
                    return int(line["unix_ns"])
    return 0
