"""Make checkpoints appear complete and disappear at once, by renames in the checkpoint folder.

| name | content | after a crash |
|---|---|---|
| `step-0000000020` | a checkpoint | stays |
| `step-0000000020.replaced` | the former save, during the next save's commit | can be restored |
| `.step-0000000020.SAVE.tmp` | a save in progress, locked by its process | deleted by a later first save |
| `.step-0000000020.SAVE.failed` | why the save failed, for the other ranks | the same |
| `.deleting-NAME.RANDOM` | a checkpoint being deleted | the same |
| `.holdfast-writer` | the writer of the folder (`writer_lease`) | stays |
| `.holdfast-writer.TOKEN.tmp` | a lease being acquired | the next writer deletes it |
| `.holdfast-line` | the abandoned steps (`lineage`) | stays |
| `aside-N` | checkpoints of another run (`set_aside`) | stays |
| `.aside-N.tmp` | the same, during the move | the next `set_aside` finishes the move |
| `.holdfast-pushed` | the checkpoints pushed to storage (`storage.push`) | stays |
"""

import contextlib
import fcntl
import logging
import os
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
"""The temporary files of `lineage`; only the folder's one writer makes them."""
_ABANDONED_AFTER_S = 300.0


class Staging:
    """Hold the staging folder of one save, and its lock, which ends with this process."""

    def __init__(self, folder: Path, step: int, save: str | None = None) -> None:
        """Make and lock the staging folder.

        If `save` is given, it is part of the folder's name, and another rank may have made the
        folder already.
        """
        self._final = step_path(folder, step)
        self.path = staging_path(folder, step, save or os.urandom(4).hex())
        # The `remove_leftovers` of another save may delete the folder until the folder is locked.
        fd = None
        while fd is None:
            self.path.mkdir(exist_ok=save is not None)
            fd = _lock(self.path)
        self._fd = fd

    def commit(self, *, final_is_damaged: bool = False, replaces: bool = True) -> Path:
        """Rename the folder to its final name, durably.

        If the step was saved before, the new checkpoint replaces the old one, and receives its pins
        and holds. At every instant, one of them can be restored.

        Args:
            final_is_damaged: whether the checkpoint under the final name is damaged.
            replaces: whether to replace an older checkpoint of the step.

        Returns:
            The folder of the checkpoint.

        Raises:
            BadUse: the step was saved before, and `replaces` is False.
            CheckpointError: another process holds the lock of the older checkpoint's marks.
            OSError: the rename failed. An older checkpoint of the step still has its name, or the
                name with `.replaced`.
        """
        replaced = replaced_path(self._final)
        hidden: Path | None = None
        fsync_folder(self.path)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(NotFound):  # the step is new
                # A concurrent pin is set before the lock is taken, or later on the new checkpoint.
                held.enter_context(locked(self._final))
            # `lexists`, because a link may be broken.
            former = [path for path in (self._final, replaced) if os.path.lexists(path)]
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
                # A crash may leave both folders: hide the damaged one, or else the older one.
                if os.path.lexists(replaced):
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
        """Release and delete the folder after a failed save."""
        os.close(self._fd)
        if self.path.exists():
            discard(self.path)


def _lock(path: Path) -> int | None:
    """Lock a folder; return its file descriptor, or None if the folder was deleted meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems cannot lock folders. `remove_leftovers` cannot lock this folder
        # either then, and does not delete it.
        _logger.debug("no lock on %s: %s", path, error)
    if path.exists():
        return fd
    os.close(fd)
    return None


def discard(path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Rename a folder to a hidden name, and then delete it.

    `progress` is called with 1 after each deleted file. Errors are logged. The next process tries
    again at its first save.
    """
    if (hidden := hide(path)) is not None:
        erase(hidden, progress)


def hide(path: Path) -> Path | None:
    """Rename a folder to a hidden name, so that it is no longer a checkpoint and can be erased.

    Returns:
        The hidden path; None if the rename failed, which is logged.
    """
    hidden = path.with_name(f".deleting-{path.name.lstrip('.')}.{os.urandom(4).hex()}")
    try:
        path.rename(hidden)
    except OSError as error:
        _warn_of_undeleted(path, error)
        return None
    # After a power cut, the folder may have its old name again, and some files may be missing;
    # `scan` then detects the damage.
    with contextlib.suppress(OSError):
        # A recent time shows that a process is deleting it, see `erase_abandoned`.
        os.utime(hidden, follow_symlinks=False)
        fsync_folder(path.parent)
    return hidden


def erase(hidden: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Delete a hidden folder, file by file; if it is a link, delete only the link.

    No file of the folder may be open, because a network file system would not delete open files.
    `progress` is called with 1 after each file: a save without progress is given up after a time
    limit, and deleting thousands of large files can take longer than this limit.
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
        _warn_of_undeleted(hidden, error)


def erase_abandoned(folder: Path) -> None:
    """Delete hidden folders that a killed process has left without deleting them."""
    for hidden in folder.glob(_LEFTOVERS[1]):
        if hidden.is_symlink() or not _has_changed_lately(hidden):
            erase(hidden)


def _warn_of_undeleted(path: Path, error: OSError) -> None:
    _logger.warning("Could not delete %s (%s). Delete it by hand if it stays.", path, error)


def has_unfinished(folder: Path) -> bool:
    """Return True if a living process is making a save in `folder`, or if this may be so."""
    candidates = ((path, _is_locked(path)) for path in folder.glob(_LEFTOVERS[0]))
    return any(
        _has_changed_lately(path) if is_locked is None else is_locked
        for path, is_locked in candidates
    )


def traces_of_unfinished(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return the names, sizes and times of the files of unfinished saves in `folder`.

    The result changes as long as a save makes progress.
    """
    traces = set()
    for staging in folder.glob(_LEFTOVERS[0]):
        with contextlib.suppress(OSError):  # the folder was renamed meanwhile
            for path in (staging, *staging.rglob("*")):
                stat = path.stat()
                traces.add((str(path), stat.st_size, stat.st_mtime_ns))
    return frozenset(traces)


def is_being_written(path: Path) -> bool:
    """Return True if a living process has locked the staging folder `path`."""
    return bool(_is_locked(path))


def _is_locked(path: Path) -> bool | None:
    """Return True if a process has locked a folder; None if the file system cannot lock folders."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # the folder was renamed meanwhile
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
    """Return True if a file in a folder has changed recently.

    This is used on file systems without locks, to detect that a process is at work.
    """
    since_s = time.time() - _ABANDONED_AFTER_S
    with contextlib.suppress(OSError):  # the folder was renamed meanwhile
        return any(each.stat().st_mtime > since_s for each in (path, *path.rglob("*")))
    return True


def remove_leftovers(
    folder: Path, *, but_of: str = "", progress: Callable[[int], None] = lambda _: None
) -> None:
    """Delete the unfinished saves and deletions in `folder` whose processes have died.

    Args:
        folder: the checkpoint folder.
        but_of: keep the saves whose id begins with this prefix and a hyphen, because another
            process resumes these saves. The empty text keeps none.
        progress: called with 1 after each deleted file.

    Raises:
        OSError: the folder cannot be read.
    """

    def of_others(pattern: str) -> Iterator[Path]:
        return (
            path for path in folder.glob(pattern) if not but_of or f".{but_of}-" not in path.name
        )

    for leftover in (*of_others(_FAILURES), *folder.glob(_LINES)):
        with contextlib.suppress(OSError):  # harmless, since save ids are not used again
            leftover.unlink()
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
            except OSError as error:  # its process is alive, or the file system cannot lock folders
                _logger.debug("left %s alone: %s", path, error)
            else:
                discard(path, progress)
            finally:
                os.close(fd)
