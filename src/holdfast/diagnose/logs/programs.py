"""Distinguish the job's own program from programs that the job runs, quotes or evaluates.

Reinforcement learning on code runs programs that a model wrote, and prints their tracebacks. Three
signs show that a traceback is not about the job itself:

* The script is generated: its path differs from earlier ones only in a number or a random name, and
  the job continued after those.
* The traceback is a report: it begins in the middle of a line, after words of the job, and all its
  frames are in one folder.
* The text is in quotes, with escaped line ends, so it is another log that the job prints.
"""

from typing import Final

import re2

_MIN_GENERATED: Final = 3
"""Programs count as generated if at least this number of different paths have the same shape, and
the job made progress between them.
"""
_SHAPES_LIMIT: Final = 256
_FOLDERS_LIMIT: Final = 256
_RANDOM = re2.compile(r"\btmp\w{4,}|\b[0-9a-f]{6,}\b|[0-9]+")


class Programs:
    """The scripts in the tracebacks of one log."""

    def __init__(self) -> None:
        self._by_shape: dict[str, tuple[int, int, int, str]] = {}
        """By shape of the path: the number of programs with progress between them; the progress and
        the number of ends at the last program; and the path of the last program."""
        self._folders: set[str] = set()
        self._ends = 0

    def note_end(self) -> None:
        """Record that a process ended. The counts of programs start again after it."""
        self._ends += 1

    def note(self, path: str, *, introduced: bool, progress: int) -> None:
        """Record the script of a traceback.

        Args:
            path: the path of the script.
            introduced: True if other words stand before the traceback in its first line.
            progress: the number of steps of the job so far, or of rises of its counters.
        """
        if not introduced and len(self._folders) < _FOLDERS_LIMIT:
            self._folders.add(folder_of(path))
        shape = str(_RANDOM.sub("#", path))
        if shape == path:
            return
        count, before, ends_before, last = self._by_shape.pop(shape, (0, -1, self._ends, ""))
        if self._ends != ends_before:
            count, before = 0, -1
        if path != last and progress > before:
            count += 1
        if len(self._by_shape) >= _SHAPES_LIMIT:
            del self._by_shape[next(iter(self._by_shape))]
        self._by_shape[shape] = (count, max(progress, before), self._ends, path)

    def is_generated(self, path: str) -> bool:
        """Return True if several programs with paths like `path` failed while the job continued."""
        return self._by_shape.get(str(_RANDOM.sub("#", path)), (0,))[0] >= _MIN_GENERATED

    def is_own_folder(self, path: str) -> bool:
        """Return True if the folder of `path` has a script of the job itself.

        Scripts of the job appear in tracebacks that start at the beginning of a line.
        """
        return folder_of(path) in self._folders


def folder_of(path: str) -> str:
    """Return the folder of `path`; an empty text if `path` has no folder."""
    return path.rpartition("/")[0]


def is_in_quotes(text: str, at: int) -> bool:
    r"""Return True if `at` lies within quotes that contain line ends written as `\n`."""
    opened, begin, position = "", 0, 0
    while position < at:
        mark = text[position]
        if mark == "\\":
            position += 1
        elif opened:
            opened = "" if mark == opened else opened
        elif mark in "\"'" and not text[position - 1 : position].isalnum():
            opened, begin = mark, position
        position += 1
    return bool(opened) and "\\n" in text[begin:]
