"""Distinguish the job's own program from programs that the job runs, quotes or judges.

A job that rewards code runs programs which a model wrote, and prints their tracebacks. Each such program has a path of
its own, differs from the one before in a number or a random name, and the job goes on. A traceback that begins within
a line, behind the job's own words, and never leaves one folder is a report about something. Text in quotes that has
escaped line ends is another log, printed by its reader.
"""

from typing import Final

import re2

_GENERATED_LEAST: Final = 3
"""So many different paths of one shape, with progress of the job between, are of generated programs."""
_SHAPES_LIMIT: Final = 256
_FOLDERS_LIMIT: Final = 256
_RANDOM = re2.compile(r"\btmp\w{4,}|\b[0-9a-f]{6,}\b|[0-9]+")


class Programs:
    """The programs whose tracebacks one log shows."""

    def __init__(self) -> None:
        self._by_shape: dict[str, tuple[int, int, int, str]] = {}
        """By shape of path: the programs with progress between, the progress and the ends then, and the last path."""
        self._folders: set[str] = set()
        self._ends = 0

    def note_end(self) -> None:
        """Take in that a process ended: programs after that are not counted with those before."""
        self._ends += 1

    def note(self, path: str, *, introduced: bool, progress: int) -> None:
        """Take in the script of a traceback.

        `introduced`: the traceback begins behind other words of its line. `progress`: the job's, in steps or rises.
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
        """Return whether programs like the one at `path` came and went while the job lived."""
        return self._by_shape.get(str(_RANDOM.sub("#", path)), (0,))[0] >= _GENERATED_LEAST

    def is_own_folder(self, path: str) -> bool:
        """Return whether a traceback that begins its line has a script in the folder of `path`."""
        return folder_of(path) in self._folders


def folder_of(path: str) -> str:
    """Return the folder of `path`, empty where `path` names no folder."""
    return path.rpartition("/")[0]


def is_in_quotes(text: str, at: int) -> bool:
    r"""Return whether `at` lies within quotes that hold line ends written as `\n`."""
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
