"""Read the logs of a run's ranks: a bounded part, a bounded search, and a cited line.

A request names an attempt and a rank by number. The path is made by `RunPaths` from the run's id in
the ledger. If a symbolic link replaces the log, the link is not followed.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core import words
from holdfast.core.paths import RunPaths
from holdfast.core.rotating_log import parts_oldest_first
from holdfast.ui.cited import log_of

PART_BYTES = 48 * 1024
"""The bytes of a log on one page."""
SEARCH_BYTES = 8 << 20
"""The bytes that one request searches; a link goes on from there."""
HITS_LIMIT = 100
RANKS_LIMIT = 4096
AROUND = 3


def ranks(paths: RunPaths, attempt: int) -> list[int]:
    """Return the ranks of an attempt that left a log on this host."""
    found = []
    try:
        with os.scandir(paths.attempt_logs(attempt)) as entries:
            for entry in entries:
                name = re.fullmatch(r"rank-(\d{1,6})\.log", entry.name)
                if name is not None:
                    found.append(int(name[1]))
                if len(found) >= RANKS_LIMIT:
                    break
    except OSError:
        return []
    return sorted(found)


class Whole:
    """The parts of a log as one file, oldest part first."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._files: list[tuple[int, int, BinaryIO]] = []
        self.size_bytes = 0
        for part in parts_oldest_first(path):
            try:
                descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            file = opened.enter_context(os.fdopen(descriptor, "rb"))
            size = os.fstat(file.fileno()).st_size
            self._files.append((self.size_bytes, size, file))
            self.size_bytes += size

    def read(self, start: int, count: int) -> bytes:
        """Return bytes of the log from an offset."""
        pieces = []
        for begin, size, file in self._files:
            at = max(start, begin)
            if begin + size > at and count > 0:
                file.seek(at - begin)
                piece = file.read(min(count, begin + size - at))
                pieces.append(piece)
                start, count = at + len(piece), count - len(piece)
        return b"".join(pieces)


def part(path: Path, end: int | None) -> dict[str, Any]:
    """Return the lines of a log that end at an offset, by default the newest.

    Returns:
        `lines`, `start`, `end` and `size_bytes`.
    """
    with ExitStack() as opened:
        log = Whole(path, opened)
        stop = log.size_bytes if end is None else max(0, min(end, log.size_bytes))
        start = max(0, stop - PART_BYTES)
        data = log.read(start, stop - start)
        if start > 0 and (cut := data.find(b"\n") + 1) > 0:
            data, start = data[cut:], start + cut
        lines = [shown(line) for line in data.splitlines()]
        return {"lines": lines, "start": start, "end": stop, "size_bytes": log.size_bytes}


def search(path: Path, text: str, start: int) -> dict[str, Any]:
    """Search a log for a text from an offset on; upper and lower case are equal.

    Returns:
        `hits`, each with the offset after its line and the line; `next`, the offset to go on from,
        or None.
    """
    wanted = text.encode("utf-8", "replace").lower()
    hits: list[dict[str, Any]] = []
    with ExitStack() as opened:
        log = Whole(path, opened)
        at = max(0, start)
        stop = min(log.size_bytes, at + SEARCH_BYTES)
        for end, line in _lines(log, at, stop):
            at = end
            if wanted in line.lower():
                hits.append({"end": end, "line": shown(line)})
                if len(hits) >= HITS_LIMIT:
                    break
        return {"hits": hits, "next": at if at < log.size_bytes and at > start else None}


def _lines(log: Whole, at: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line with the offset after the line; a long line comes in pieces."""
    while at < stop:
        data = log.read(at, min(1 << 20, stop - at))
        if not data:
            return
        whole = data.rfind(b"\n") + 1 or len(data)
        for line in data[:whole].splitlines(keepends=True):
            at += len(line)
            yield at, line


def surroundings(home: Path, run_id: str, place: str) -> list[dict[str, Any]]:
    """Return the lines around a cited line; empty if the log is not on this host.

    Args:
        home: the folder above the run's folder.
        run_id: the id of the run in the ledger.
        place: the citation, `attempt-001/rank-3.log:212`, from the diagnosis.
    """
    found = log_of(home, run_id, place)
    if found is None:
        return []
    path, cited = found
    around: dict[int, str] = {}
    with ExitStack() as opened:
        whole, at = Whole(path, opened), 1
        for _, line in _lines(whole, 0, min(whole.size_bytes, SEARCH_BYTES)):
            if at > cited + AROUND:
                break
            if at >= cited - AROUND:
                around[at] = shown(line)
            # As in the diagnosis, a carriage return ends no line: a progress bar keeps its last
            # state.
            at += line.endswith(b"\n")
    return [
        {"number": number, "text": text, "is_cited": number == cited}
        for number, text in around.items()
    ]


def shown(line: bytes) -> str:
    """Return a line as a page shows it: without colours and control characters, bounded."""
    return words.clean(line.rstrip(b"\r\n").decode("utf-8", "replace"))
