"""Files and folders to blocks of whole lines, in bounded memory."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import re2

from holdfast.core.errors import NotFound

LINE_LIMIT_BYTES: Final = 16 * 1024
"""What is kept of one line; the rest of a longer one is skipped."""
BLOCK_BYTES: Final = 1 << 20

_RANK_FILE = re2.compile(r"^rank-([0-9]{1,6})\.log")
_ROTATED = re2.compile(r"^(.*)\.([0-9]{1,6})$")


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One log file, or one part of a rotated one."""

    path: Path
    group: str
    """The path without the number of its rotated part: the parts of one group are one log."""
    part: int
    """0 the newest, larger is older."""
    rank: int | None
    """The rank whose output it is, by its name `rank-N.log`."""


def find_files(paths: Iterable[str | os.PathLike[str]]) -> tuple[LogFile, ...]:
    """The readable log files behind `paths`, older parts of a rotated log before newer ones.

    A folder stands for its own files with `.log` in their names; what cannot be read is passed over.

    Raises:
        NotFound: none of the paths exists.
    """
    given = [Path(path) for path in paths]
    found: dict[Path, LogFile] = {}
    any_exists = False
    for path in given:
        try:
            any_exists |= path.exists()
            inside = sorted(path.glob("*.log*")) if path.is_dir() else [path]
        except OSError:
            continue
        for file in inside:
            if file.is_file() and os.access(file, os.R_OK):
                found.setdefault(file.resolve(), _log_file(file))
    if not any_exists:
        names = ", ".join(map(str, given)) or "(no path given)"
        raise NotFound(f"There is no log at {names}. Give a log file, or the folder of the job's logs.")
    return tuple(sorted(found.values(), key=lambda file: (file.group, -file.part)))


def _log_file(path: Path) -> LogFile:
    rank = _RANK_FILE.search(path.name)
    rotated = _ROTATED.search(str(path))
    return LogFile(
        path=path,
        group=rotated[1] if rotated else str(path),
        part=int(rotated[2]) if rotated else 0,
        rank=int(rank[1]) if rank else None,
    )


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    r"""Yield blocks of whole lines with the number of their first line, up to the size the file has now.

    A carriage return also ends a line (progress bars redraw theirs with it), but only `\n` is counted, as
    editors do. A file that cannot be read any further ends there.
    """
    try:
        with path.open("rb", buffering=0) as file:
            yield from _whole_lines(file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError:
        return  # a log on a broken disk: what was read so far is used


def _whole_lines(descriptor: int, size_bytes: int) -> Iterator[tuple[bytes, int]]:
    left_bytes = size_bytes
    number = 1
    carry = b""
    cutting = False  # the carried line reached its limit: skip to its end
    while left_bytes > 0 and (data := os.read(descriptor, min(BLOCK_BYTES, left_bytes))):
        left_bytes -= len(data)
        if cutting:
            ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
            if not ends:
                continue
            data, cutting = data[min(ends) :], False
        data = carry + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        block, carry = data[:end], data[end:]
        if len(carry) > LINE_LIMIT_BYTES:
            carry, cutting = carry[:LINE_LIMIT_BYTES], True
        if block:
            yield block, number
            number += block.count(b"\n")
    if carry:
        yield carry, number
