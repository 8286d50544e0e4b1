"""Manage a node's shared memory for models: owner, budget and release.

Models are in `ROOT/holdfast-UID/SESSION/model-N/`; the last session removes `holdfast-UID`. ROOT is
/dev/shm, or a folder that the caller chooses. A session belongs to one agent, which holds a lock
(flock) on the session's folder. The kernel releases the lock however the agent ends. So an unlocked
session has no owner, and the next agent removes it. Unlike a process id, a lock works across
containers that share the memory. A removed file stays available to an engine that has mapped it.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from holdfast.core.errors import BadUse
from holdfast.core.words import size
from holdfast.evaluate.types.errors import EvaluationError

DEFAULT_ROOT = Path("/dev/shm")
_LOCK = ".lock"


class MemoryFull(EvaluationError):
    """A model does not fit into a node's shared memory.

    `after_release` is True if the model would fit once the present models are released.
    """

    def __init__(self, message: str, *, after_release: bool) -> None:
        super().__init__(message)
        self.after_release = after_release


class SharedFile:
    """A file of fixed size that any thread may write in place.

    The file is closed when nothing refers to it any more.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Do not close the file explicitly: a thread may still write, and the descriptor may be
        # reused.
        weakref.finalize(self, os.close, self.fd)
        os.truncate(self.fd, size_bytes)

    def fileno(self) -> int:
        """Return the file descriptor, for sendfile."""
        return self.fd

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at an offset.

        The file is written by pwrite: if the memory is full, pwrite raises an error, where a
        mapping would raise a signal.

        Raises:
            OSError: the memory is full (ENOSPC).
        """
        while data.nbytes:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count


class SharedMemory:
    """Keep the models of one session on one node.

    Args:
        root: the folder for all sessions; None for /dev/shm, or for the system's temporary folder
            if /dev/shm cannot be written. In the latter case, `note` explains that models are on a
            disk, and that engines share them through the page cache.
        session: a name that is unique among the running sessions on this machine.
        budget_bytes: the largest number of bytes that this session may use.

    Raises:
        BadUse: the session is in use, or its folder belongs to another user.
    """

    def __init__(self, root: Path | None, session: str, budget_bytes: int) -> None:
        self.note = ""
        if root is None:
            root = DEFAULT_ROOT
            if not os.access(root, os.W_OK | os.X_OK):
                root = Path(tempfile.gettempdir())
                self.note = (
                    f"There is no {DEFAULT_ROOT} to write to: models are kept in {root}, on a disk."
                )
        if not session or PurePosixPath(session).name != session or session.startswith("."):
            raise BadUse(f"{session!r} cannot name a session. Use letters, digits, `-` and `_`.")
        self.budget_bytes = budget_bytes
        self._used: dict[str, int] = {}
        with _locked(root) as own:  # no other agent clears the session before it is locked
            self.cleared = _clear_sessions_of_the_dead(own)
            self.folder = own / session
            try:
                self.folder.mkdir(mode=0o700)
            except FileExistsError as error:
                raise BadUse(
                    f"The session {self.folder} is in use by a living agent. Name another one."
                ) from error
            self._lock_fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            os.write(self._lock_fd, f"{os.getpid()}\n".encode())

    @property
    def used_bytes(self) -> int:
        """The number of bytes that are reserved."""
        return sum(self._used.values())

    def make(
        self, name: str, files: Iterable[tuple[str, int]], needed_bytes: int
    ) -> list[SharedFile]:
        """Reserve `needed_bytes` and create a folder with sparse files of the given sizes.

        Raises:
            MemoryFull: the budget or the machine's memory is too small; nothing was created.
            BadUse: a file would be outside of the folder.
        """
        self.set_aside(name, needed_bytes)
        try:
            return [SharedFile(self._place(name, path), size_bytes) for path, size_bytes in files]
        except BaseException:
            self.drop(name)
            raise

    def set_aside(self, name: str, needed_bytes: int) -> None:
        """Reserve bytes for a folder that will have this name.

        Raises:
            MemoryFull: there are not enough bytes.
        """
        free_bytes = shutil.disk_usage(self.folder).free
        # Subtract reserved bytes that are not written yet, which the file system still counts as
        # free.
        unwritten_bytes = max(0, self.used_bytes - self._written_bytes())
        if (
            self.used_bytes + needed_bytes > self.budget_bytes
            or unwritten_bytes + needed_bytes > free_bytes
        ):
            raise self.full(needed_bytes, free_bytes=free_bytes - unwritten_bytes)
        self._used[name] = needed_bytes

    def full(self, needed_bytes: int, *, free_bytes: int | None = None) -> MemoryFull:
        """Return the error for bytes that do not fit, with figures and the next step."""
        free_bytes = shutil.disk_usage(self.folder).free if free_bytes is None else free_bytes
        return MemoryFull(
            f"The shared memory of this node is full: {size(needed_bytes)} are needed in "
            f"{self.folder.parent.parent}, "
            f"which has {size(max(0, free_bytes))} free; {size(self.used_bytes)} of this session's "
            f"{size(self.budget_bytes)} are in use. Mount a larger {DEFAULT_ROOT}, "
            "or use nodes with more memory.",
            after_release=needed_bytes
            <= min(self.budget_bytes, max(0, free_bytes) + self.used_bytes),
        )

    def path(self, name: str) -> Path:
        """Return the path of the folder with this name."""
        return self.folder / name

    def drop(self, name: str) -> None:
        """Remove a folder and free its reserved bytes."""
        if self.path(name).exists():
            shutil.rmtree(self.path(name))
        self._used.pop(name, None)

    def close(self) -> None:
        """Remove the session's folder and release its lock; a second call does nothing."""
        if self._lock_fd >= 0:
            with _locked(self.folder.parent.parent) as own:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.close(self._lock_fd)
                self._lock_fd = -1
                if [path.name for path in own.iterdir()] == [_LOCK]:
                    shutil.rmtree(own)

    def _written_bytes(self) -> int:
        files = (Path(root, name) for root, _, names in os.walk(self.folder) for name in names)
        return sum(file.stat().st_blocks * 512 for file in files)

    def _place(self, name: str, path: str) -> Path:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise BadUse(
                f"The model names {path!r}, which would lie outside of its folder. Do not trust it."
            )
        place = self.path(name) / pure
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place


def is_full(error: OSError) -> bool:
    """Return True if a write failed because the memory or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _own_folder(root: Path) -> Path:
    own = root / f"holdfast-{os.getuid()}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BadUse(
            f"{own} belongs to another user. Remove it, or name another folder for shared memory."
        )
    return own


def _clear_sessions_of_the_dead(own: Path) -> list[str]:
    """Remove all unlocked sessions and return their names; the caller holds the lock of `own`."""
    cleared = []
    for session in sorted(own.iterdir()):
        if session.is_dir() and not session.is_symlink() and not _is_held(session / _LOCK):
            shutil.rmtree(session)
            cleared.append(session.name)
    return cleared


def _is_held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # the process that cleared it died halfway
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


@contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """Lock this user's folder in `root` inside a `with` block; yield the folder.

    The folder is created if it is missing; the last session removes it.
    """
    while True:
        own = _own_folder(root)
        try:
            fd = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # removed in between
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # otherwise it was removed during the wait
                yield own
                return
        finally:
            os.close(fd)
