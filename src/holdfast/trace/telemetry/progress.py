"""Report the progress of reading telemetry, in bytes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[str, float, float | None], None]
"""A function `progress(description, done, total)`, as in `holdfast.trace.load`."""


class BytesRead:
    """Add up the bytes that several threads read from several files, and report the sum."""

    def __init__(self, progress: Progress | None, files: Sequence[Path]) -> None:
        self._progress = progress
        self._total = float(sum(path.stat().st_size for path in files if path.is_file()))
        self._done = 0.0
        self._lock = threading.Lock()

    def of(self, path: Path) -> Callable[[int], None] | None:
        """Return a function to which readers of the file report the number of bytes they have read.

        Return None if there is no progress callback.
        """
        if self._progress is None:
            return None
        show = self._progress

        def add(size_bytes: int) -> None:
            with self._lock:
                self._done = min(self._done + size_bytes, self._total)
                show(f"Reading {path.name}", self._done, self._total)

        return add
