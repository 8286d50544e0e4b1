"""Distinguish the job's own program from programs that the job runs, quotes or judges.

Reinforcement learning on code runs programs that a model wrote, and prints their tracebacks. Each
such program has its own path, which differs from the last in a number or a random name, and the job
goes on. A traceback is a report if it begins within a line, behind the job's own words, and never
leaves one folder. Text in quotes with escaped line ends is another log that the job prints.
"""

from typing import Final

import re2

_GENERATED_LEAST: Final = 3
"""The different paths of one shape, with progress of the job between, that show generated programs.
"""
_SHAPES_LIMIT: Final = 256
_FOLDERS_LIMIT: Final = 256
_RANDOM = re2.compile(r"\btmp\w{4,}|\b[0-9a-f]{6,}\b|[0-9]+")


class Programs:
    """The programs in the tracebacks of one log."""

    def __init__(self) -> None:
        self._by_shape: dict[str, tuple[int, int, int, str]] = {}
        """By shape of path: the number of programs with progress between, the progress and the ends
        at the last one, and its path."""
        self._folders: set[str] = set()
        self._ends = 0

    def note_end(self) -> None:
        """Record that a process ended. Programs after the end are counted anew."""
        self._ends += 1

    def note(self, path: str, *, introduced: bool, progress: int) -> None:
        """Record the script of a traceback.

        Args:
            path: the script.
            introduced: the traceback begins behind other words of its line.
            progress: the steps or rises of the job so far.
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
        """Return True if several programs like the one at `path` ended while the job went on."""
        return self._by_shape.get(str(_RANDOM.sub("#", path)), (0,))[0] >= _GENERATED_LEAST

    def is_own_folder(self, path: str) -> bool:
        """Return True if a traceback that begins its line had a script in the folder of `path`."""
        return folder_of(path) in self._folders


def folder_of(path: str) -> str:
    """Return the folder of `path`; empty if `path` has none."""
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
