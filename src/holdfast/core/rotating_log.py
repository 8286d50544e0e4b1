"""A log file of bounded size, written by one process.

`NAME` is the newest part, `NAME.1` the one before it, and so on; what falls off the end is gone. Parts are cut at
line ends, so a citation of a line stays a whole line. A crash loses nothing that `write` was given.
"""

from pathlib import Path
from typing import BinaryIO

PARTS = 4


class RotatingLog:
    """Keeps the last `max_bytes` of what is written to it, in `PARTS` files.

    Attributes:
        written_bytes: all that was ever written.
        dropped_bytes: how much of it fell off the end.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        assert max_bytes >= PARTS
        self._path = path
        self._part_bytes = max_bytes // PARTS
        self.written_bytes = 0
        self.dropped_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._filled_bytes = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append `data`, turning to a new part where this one is full.

        A disk that does not take it costs those lines, never the process that prints them.
        """
        self.written_bytes += len(data)
        try:
            self._write(data)
        except OSError:
            self.dropped_bytes += len(data)

    def _write(self, data: bytes) -> None:
        while data:
            room = self._part_bytes - self._filled_bytes
            if len(data) <= room:
                self._append(data)
                return
            # Cut at a line's end: the last one that fits, else (a line longer than what is left) the first
            # one beyond, unless the line alone would fill a part twice.
            cut = data.rfind(b"\n", 0, max(room, 0)) + 1 or data.find(b"\n", 0, room + self._part_bytes) + 1
            if cut == 0:
                if len(data) <= room + self._part_bytes:
                    self._append(data)
                    return
                cut = room + self._part_bytes
            self._append(data[:cut])
            data = data[cut:]
            self._rotate()

    def close(self) -> None:
        """Close the newest part."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._filled_bytes += len(data)

    def _rotate(self) -> None:
        self._file.close()
        oldest = part_path(self._path, PARTS - 1)
        if oldest.exists():
            self.dropped_bytes += oldest.stat().st_size
        for index in range(PARTS - 1, 0, -1):
            newer = part_path(self._path, index - 1)
            if newer.exists():
                newer.replace(part_path(self._path, index))
        self._file = self._path.open("ab", buffering=0)
        self._filled_bytes = 0


def part_path(path: Path, index: int) -> Path:
    """The file of part `index`: 0 is the newest."""
    return path if index == 0 else path.with_name(f"{path.name}.{index}")


def parts_oldest_first(path: Path) -> list[Path]:
    """The parts that exist, in the order they were written."""
    return [part for index in range(PARTS - 1, -1, -1) if (part := part_path(path, index)).exists()]
