"""Folders appear whole and disappear at once: the names in a checkpoint folder, and how they change.

| name | what it is | after a crash |
|---|---|---|
| `step-0000000020` | a checkpoint | stays |
| `step-0000000020.replaced` | the former, while its step is saved again | a candidate until the next save |
| `.step-0000000020.SAVE.tmp` | a save in progress, locked by its process | removed by a later first save |
| `.step-0000000020.SAVE.failed` | why it failed, for the other ranks | the same |
| `.deleting-NAME.RANDOM` | a checkpoint on its way out | the same |
| `.holdfast-writer` | who saves into the folder (`lease`) | stays |
| `.holdfast-writer.TOKEN.tmp` | one that is being taken | removed by the next one |
| `.holdfast-line` | which steps training has left behind (`lineage`) | stays |
| `aside-N` | the checkpoints of another run, set aside (`aside`) | stays |
| `.aside-N.tmp` | the same, on their way there | finished by the next one that sets aside |
| `.holdfast-pushed` | which of them were pushed to storage (`storage.push`) | stays |
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.checkpoint.catalog.annotations import inherit_claims, locked
from holdfast.checkpoint.format.paths import replaced_path, staging_path, step_path
from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import BadUse, NotFound

_logger = logging.getLogger("holdfast")
_LEFTOVERS = (".step-*.tmp", ".deleting-*")
_FAILURES = ".step-*.failed"
_LINES = "..holdfast-line.*.tmp"
"""Temporary files of `lineage`, which the one writer of a folder alone writes."""
_ABANDONED_AFTER_S = 300.0


class Staging:
    """The hidden folder in which one save is prepared; locked while the process that made it lives."""

    def __init__(self, folder: Path, step: int, save: str | None = None) -> None:
        """Make it; where `save` is given it has that name, and other ranks may have made it already."""
        self._final = step_path(folder, step)
        self.path = staging_path(folder, step, save or secrets.token_hex(4))
        self.path.mkdir(exist_ok=save is not None)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems lock no folders; `remove_leftovers` cannot there, and leaves it.
            _logger.debug("no lock on %s: %s", self.path, error)

    def commit(self, *, final_is_damaged: bool = False, replaces: bool = True) -> Path:
        """Give the folder its proper name, durably. At every instant one of old and new has a good name.

        Where the step was saved before, whoever has pinned or wanted that checkpoint has this one instead.

        Raises:
            BadUse: the step was saved before, and `replaces` is False.
            CheckpointError: another process does not let go of the marks of the older one.
            OSError: it has not got its name; an older one of the step still has its own or `.replaced`.
        """
        replaced = replaced_path(self._final)
        hidden: Path | None = None
        fsync_folder(self.path)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(NotFound):  # the step is new
                held.enter_context(
                    locked(self._final)
                )  # a pin comes before this, or goes to the new one
            former = [
                path for path in (self._final, replaced) if os.path.lexists(path)
            ]  # a link may lead to nothing
            if former and not replaces:
                raise BadUse(
                    f"There is a checkpoint {former[0]} already. Give another step or another folder."
                )
            inherit_claims(
                [path for path in former if path.is_dir()],
                self.path,
                now_s=self.path.stat().st_mtime,
            )
            if os.path.lexists(self._final):
                if os.path.lexists(
                    replaced
                ):  # left by a crash: of the two, keep the one that may still be good
                    hidden = hide(self._final if final_is_damaged else replaced)
                if os.path.lexists(self._final):
                    self._final.rename(replaced)
            self.path.rename(self._final)
            fsync_folder(self._final.parent)
        if hidden is not None:
            erase(hidden)
        if os.path.lexists(replaced):
            discard(replaced)
        os.close(self._fd)
        return self._final

    def abandon(self) -> None:
        """Remove the folder; the save failed."""
        os.close(self._fd)
        if self.path.exists():
            discard(self.path)


def discard(path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Take a folder out of sight in one step, then delete it; `progress` is told 1 after each file.

    What cannot be deleted is logged and left: a later first save tries again.
    """
    if (hidden := hide(path)) is not None:
        erase(hidden, progress)


def hide(path: Path) -> Path | None:
    """Take a folder out of sight in one step; where it is then, to be erased. None: it could not be, and is told."""
    hidden = path.with_name(f".deleting-{path.name.lstrip('.')}.{secrets.token_hex(4)}")
    try:
        path.rename(hidden)
    except OSError as error:
        _tell_of_undeleted(path, error)
        return None
    with contextlib.suppress(
        OSError
    ):  # what comes back after a power cut lacks files, which is seen
        os.utime(hidden, follow_symlinks=False)  # somebody is at it, see `erase_abandoned`
        fsync_folder(path.parent)
    return hidden


def erase(hidden: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Delete what was hidden, while nothing in it is open: network file systems would keep that.

    Of a link, what it leads to stays.

    `progress` is told 1 after each file: thousands of large ones take longer than a save may get nowhere.
    """
    try:
        if hidden.is_symlink():
            hidden.unlink(missing_ok=True)
            return
        for path in hidden.iterdir():
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                progress(1)
        shutil.rmtree(hidden)
    except OSError as error:
        _tell_of_undeleted(hidden, error)


def erase_abandoned(folder: Path) -> None:
    """Delete what somebody had hidden, who was killed before it was erased."""
    for hidden in folder.glob(_LEFTOVERS[1]):
        if hidden.is_symlink() or not _has_changed_lately(hidden):
            erase(hidden)


def _tell_of_undeleted(path: Path, error: OSError) -> None:
    _logger.warning("Could not delete %s (%s). Delete it by hand if it stays.", path, error)


def has_unfinished(folder: Path) -> bool:
    """Whether a living process prepares a save in `folder`, or may do so."""
    told = ((path, _is_locked(path)) for path in folder.glob(_LEFTOVERS[0]))
    return any(
        _has_changed_lately(path) if is_locked is None else is_locked for path, is_locked in told
    )


def traces_of_unfinished(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return what changes as long as a save that is being prepared in `folder` makes progress."""
    traces = set()
    for staging in folder.glob(_LEFTOVERS[0]):
        with contextlib.suppress(OSError):  # it has its name now
            for path in (staging, *staging.rglob("*")):
                stat = path.stat()
                traces.add((str(path), stat.st_size, stat.st_mtime_ns))
    return frozenset(traces)


def is_being_written(path: Path) -> bool:
    """Whether a living process prepares the save in the hidden folder `path`, as far as its lock tells."""
    return bool(_is_locked(path))


def _is_locked(path: Path) -> bool | None:
    """None where the file system locks no folders, and nobody could ever tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it has its name now
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        _logger.debug("cannot tell whether %s is being written: %s", path, error)
        return None
    finally:
        os.close(fd)
    return False


def _has_changed_lately(path: Path) -> bool:
    """Whether something in a folder has, which tells where a lock cannot."""
    since_s = time.time() - _ABANDONED_AFTER_S
    with contextlib.suppress(OSError):  # it has its name now
        return any(each.stat().st_mtime > since_s for each in (path, *path.rglob("*")))
    return True


def remove_leftovers(
    folder: Path, *, but_of: str = "", progress: Callable[[int], None] = lambda _: None
) -> None:
    """Delete what saves and deletions of dead processes left in `folder`.

    Args:
        folder: of the checkpoints.
        but_of: saves whose names begin with this and a hyphen are another process's to take up.
        progress: told 1 after each file.

    Raises:
        OSError: the folder cannot be read.
    """

    def of_others(pattern: str) -> Iterator[Path]:
        return (
            path for path in folder.glob(pattern) if not but_of or f".{but_of}-" not in path.name
        )

    for told in (*of_others(_FAILURES), *folder.glob(_LINES)):
        with contextlib.suppress(OSError):  # it is of a save whose name nobody takes again
            told.unlink()
    for pattern in _LEFTOVERS:
        for path in of_others(pattern):
            if path.is_symlink():
                erase(path, progress)
                continue
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                _logger.debug("left %s alone: %s", path, error)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # its process lives, or this file system locks no folders
                _logger.debug("left %s alone: %s", path, error)
            else:
                discard(path, progress)
            finally:
                os.close(fd)
