"""Write a log file of bounded size, from one process.

The log consists of parts. `NAME` is the newest part, `NAME.1` the part before it, and so on. When
there are too many parts, the oldest is deleted. Parts end at line ends, so that each line is in one
part. A crash loses no bytes that were passed to `write`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTS = 4
_CHUNK_BYTES = 1 << 20


class RotatingLog:
    """Keep the last `max_bytes` bytes of a log, in `PARTS` files.

    Attributes:
        written_bytes: the number of bytes that were ever passed to `write`.
        dropped_bytes: the number of these bytes that were deleted or could not be written.
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
        """Append `data`; start a new part when the newest part is full.

        If the disk fails, the data are lost, but no error is raised, so that the process continues.
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
            # Cut at the last line end that fits. If the line is longer than the room, cut at the
            # line's own end, unless the line would make the part twice as large as allowed.
            cut = (
                data.rfind(b"\n", 0, max(room, 0)) + 1
                or data.find(b"\n", 0, room + self._part_bytes) + 1
            )
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
    """Return the path of part `index` of the log at `path`; part 0 is the newest."""
    return path if index == 0 else path.with_name(f"{path.name}.{index}")


def parts_oldest_first(path: Path) -> list[Path]:
    """Return the paths of the existing parts of a log, oldest first."""
    return [part for index in range(PARTS - 1, -1, -1) if (part := part_path(path, index)).exists()]


class LogTail:
    """Read a rotating log from its oldest part on, and follow the log across rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._part = 0

    def read(self) -> Iterator[tuple[bytes, int]]:
        """Yield all bytes that were not read before, in chunks, each with the number of its part.

        The parts are numbered from 0, in the order of reading. If parts were deleted before they
        were read, the numbers increase by `PARTS`, which shows the gap.

        Raises:
            OSError: the log cannot be read.
        """
        while True:
            yield from self._rest()
            following = self._following()
            if following is None:
                return
            # The writer may have filled the part between the last read and the rotation.
            yield from self._rest()
            self.close()
            self._file, self._part = following

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rest(self) -> Iterator[tuple[bytes, int]]:
        """Yield the unread bytes of the current part."""
        while self._file is not None and (chunk := self._file.read(_CHUNK_BYTES)):
            yield chunk, self._part

    def _following(self) -> tuple[BinaryIO, int] | None:
        """Open the next part of the log; return the part and its number, None if there is none.

        If the current part was deleted, the oldest existing part is opened.
        """
        reading = None if self._file is None else os.fstat(self._file.fileno()).st_ino
        parts = parts_oldest_first(self._path)
        try:
            inodes = [part.stat().st_ino for part in parts]
            at = inodes.index(reading) + 1 if reading in inodes else 0
            if at == len(parts):
                return None
            following = parts[at].open("rb")
        except FileNotFoundError:
            return None  # rotated just now; the next call finds the part
        if os.fstat(following.fileno()).st_ino != inodes[at]:
            following.close()
            return None
        if reading is None:
            return following, self._part
        return following, self._part + (1 if reading in inodes else PARTS)
