"""Read the logs of a running attempt as they grow, so that a failure can be diagnosed at once.

Otherwise, a restart would have to wait until gigabytes of logs are read.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.rotating_log import LogTail
from holdfast.diagnose import (
    Diagnosis,
    JobContext,
    Kept,
    LogWatcher,
    compress,
    find_files,
    rank_by_name,
    scan,
)
from holdfast.diagnose.memory import Known

FOLLOW_S = 5.0
"""The seconds between two reads of the logs. If an attempt ends before the first read, the rules
need not be loaded while it runs.
"""


class LogFollower:
    """Follow the logs in one folder.

    All methods except `follow` block, and may be called in any thread.
    """

    def __init__(self, folder: Path, known: Callable[[], Known] = Known) -> None:
        """Store the folder; `known` returns the learned rules, and is called at the first read."""
        self._folder = folder
        self._load = known
        self._tails: dict[Path, LogTail] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    async def follow(self) -> None:
        """Read the logs repeatedly until the follower is closed."""
        while not self._closed.is_set():
            await asyncio.sleep(FOLLOW_S)
            try:
                await asyncio.to_thread(self.read)
            except Exception:
                return  # the diagnosis meets the same error again, and reports it

    def read(self) -> None:
        """Read the lines written since the last call, and prepare the search among past incidents."""
        with self._lock:
            self._read()
            self._known[0].memory.prepare()

    def diagnosis(self, context: JobContext) -> Diagnosis:
        """Return the diagnosis of the attempt, once nothing more is written to the logs."""
        with self._lock:
            self._read()
            known, notes = self._known
            decided = self._watcher.diagnosis(context, ended=True)
            return known.recall(replace(decided, notes=(*decided.notes, *notes)), self._kept)

    def close(self) -> None:
        """Close the files; a `read` in progress ends soon."""
        self._closed.set()
        with self._lock:
            for tail in self._tails.values():
                tail.close()

    @functools.cached_property
    def _known(self) -> tuple[Known, tuple[str, ...]]:
        """Return the learned rules, and a sentence if they could not be read."""
        try:
            known = self._load()
            known.rules  # noqa: B018 - rules of a user that contradict others are found here
        except HoldfastError as error:
            return Known(), (f"Rules learned from past incidents are not used: {error}",)
        return known, ()

    @functools.cached_property
    def _watcher(self) -> LogWatcher:
        return LogWatcher(self._known[0].rules)

    def _read(self) -> None:
        for log in sorted(self._folder.glob("*.log")):
            if self._closed.is_set():
                return
            rank = rank_by_name(log.name)
            if log not in self._tails:
                self._tails[log] = LogTail(log)
                self._watcher.feed(b"", log=str(log), rank=rank)  # an empty log is information, too
            with suppress(OSError):  # a log that cannot be read is skipped
                for data, part in self._tails[log].read():
                    self._watcher.feed(data, log=str(log), rank=rank, part=part)
                    if self._closed.is_set():
                        break

    def _kept(self) -> tuple[Kept, ...]:
        """Read the logs again, and return their unusual lines.

        Only a case that no rule decides needs these lines.
        """
        files = find_files([self._folder]).files
        known, _ = self._known
        return compress(files, scan(files, known.rules), known.filters).lines
