"""Reads the logs of a running attempt as they are written, so that its diagnosis is ready when it fails.

A restart does not wait until gigabytes of logs are read.
"""

import functools
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.rotating_log import LogTail
from holdfast.diagnose import Diagnosis, JobContext, LogWatcher
from holdfast.diagnose.compress import Kept, compress
from holdfast.diagnose.memory import Known
from holdfast.diagnose.read import find_files
from holdfast.diagnose.scan import scan

_RANK = re.compile(r"^rank-([0-9]+)$")


class LogFollower:
    """Follows the logs in one folder. Its methods block; they may be called from any thread."""

    def __init__(self, folder: Path, known: Callable[[], Known] = Known) -> None:
        """`known` gives what was learned from past incidents; it is called when first something is read."""
        self._folder = folder
        self._load = known
        self._tails: dict[Path, LogTail] = {}
        self._lock = threading.Lock()
        self._closed = False

    def read(self) -> None:
        """Take in what was written since."""
        with self._lock:
            self._read()

    def diagnosis(self, context: JobContext) -> Diagnosis:
        """Why the attempt failed, once nothing more is written."""
        with self._lock:
            self._read()
            known, notes = self._known
            decided = self._watcher.diagnosis(context, ended=True)
            return known.recall(replace(decided, notes=(*decided.notes, *notes)), self._kept)

    def close(self) -> None:
        """Let go of the files; a `read` that is going on ends soon."""
        self._closed = True
        with self._lock:
            for tail in self._tails.values():
                tail.close()

    @functools.cached_property
    def _known(self) -> tuple[Known, tuple[str, ...]]:
        """What was learned, and a sentence where that cannot be had."""
        try:
            known = self._load()
            known.rules  # noqa: B018 - rules of a user that contradict others are found here
        except HoldfastError as error:
            return Known(), (f"What was learned from past incidents is left out: {error}",)
        return known, ()

    @functools.cached_property
    def _watcher(self) -> LogWatcher:
        return LogWatcher(self._known[0].rules)

    def _read(self) -> None:
        for log in sorted(self._folder.glob("*.log")):
            named = _RANK.search(log.stem)
            rank = None if named is None else int(named[1])
            if log not in self._tails:
                self._tails[log] = LogTail(log)
                self._watcher.feed(b"", log=str(log), rank=rank)  # that a rank says nothing tells something too
            with suppress(OSError):  # a log that cannot be read is passed over
                for data, part in self._tails[log].read():
                    self._watcher.feed(data, log=str(log), rank=rank, part=part)
                    if self._closed:
                        return

    def _kept(self) -> tuple[Kept, ...]:
        """What stands out in the logs: they are read again, which only a case needs that no rule knows."""
        files = find_files([self._folder]).files
        known, _ = self._known
        return compress(files, scan(files, known.rules), known.filters).lines
