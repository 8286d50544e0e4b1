"""Find the log that a citation names, and the user's own frame in the traceback above the line."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.core import words
from holdfast.core.paths import RunPaths
from holdfast.core.rotating_log import parts_oldest_first

ABOVE: Final = 400
"""The most lines above a cited line that are searched for a traceback."""
_CITED = re.compile(r"(?:logs/)?attempt-(\d{1,6})/(rank-(\d{1,6})|observer|launcher)\.log(?:\.\d)?")
_FRAME = re.compile(r'File "([^"]{1,500})", line \d{1,7}')
_LIBRARY = ("/site-packages/", "/dist-packages/", "<frozen ", "/lib/python", "/lib64/python")


def log_of(home: Path, run_id: str, place: str) -> tuple[Path, int] | None:
    """Return the path of the log that a citation names, and the line number.

    The result is None for a text that is no citation.

    Args:
        home: the folder above the run's folder.
        run_id: the run, as the ledger names it.
        place: the citation from the diagnosis, such as `attempt-001/rank-3.log:212`.
    """
    file, _, number = place.rpartition(":")
    found = _CITED.search(file)
    if found is None or not number.isdigit():
        return None
    paths, attempt = RunPaths(home, run_id), int(found[1])
    log = {"observer": paths.observer_log, "launcher": paths.launcher_log}.get(found[2])
    path = paths.rank_log(attempt, int(found[3])) if log is None else log(attempt)
    return path, int(number)


def own_frame(home: Path, run_id: str, place: str) -> tuple[str, str] | None:
    """Find the deepest traceback frame that is in the user's code, above a cited line.

    Frames in installed packages are skipped.

    Args:
        home: as for `log_of`.
        run_id: as for `log_of`.
        place: as for `log_of`.

    Returns:
        The place of the frame (file and line number in the log) and its text, which is the frame's
        line and the line of source below it. None if there is no traceback directly above the cited
        line, no frame in the user's code, or no log on this host.
    """
    found = log_of(home, run_id, place)
    if found is None:
        return None
    path, cited = found
    above: deque[str] = deque(maxlen=ABOVE)
    try:
        for number, line in enumerate(_lines(path), start=1):
            if number >= cited:
                break
            above.append(line)
    except OSError:
        return None
    texts = list(above)
    heads = [at for at, text in enumerate(texts) if "Traceback (most recent call last)" in text]
    if not heads:
        return None
    for at in range(len(texts) - 1, heads[-1], -1):
        frame = _FRAME.search(texts[at])
        if frame and not any(part in frame[1] for part in _LIBRARY):
            source = texts[at + 1] if at + 1 < len(texts) else ""
            lines = [text.strip() for text in (texts[at], source) if not _is_frame(text, texts[at])]
            where = f"{place.rpartition(':')[0]}:{cited - len(texts) + at}"
            return where, "\n".join(words.clean(text) for text in [texts[at].strip(), *lines])
    return None


def _is_frame(text: str, frame: str) -> bool:
    return not text.strip() or text is frame or _FRAME.search(text) is not None


def _lines(path: Path) -> Iterator[str]:
    for part in parts_oldest_first(path):
        with part.open("rb") as file:
            for line in file:
                yield line.decode("utf-8", "replace").rstrip("\r\n")
