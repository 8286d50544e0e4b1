"""Record the files that a computation read, with digests, so that its result is reused safely.

Files of installed packages are not recorded. Instead, `package_versions` identifies the installed
packages by their versions.
"""

import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path

MAX_FILES = 500
"""A result that depends on more files than this is not kept for reuse."""
CHANGED = "changed"
"""The digest of a file that changed between two reads; no content has this digest."""
ABSENT = ""
_HASHED_BYTES = 64 * 1024 * 1024
_NO_FILES = ("/proc/", "/sys/", "/dev/fd/", "/dev/null", "/dev/urandom")
_TASKS = f"{os.sep}lm_eval{os.sep}tasks{os.sep}"

Stamp = tuple[int, int, int]


def content_digest(path: str) -> str:
    """Return a digest of a file's content; for a large file, its size and modification time.

    Returns:
        The digest, or `ABSENT` if there is no readable file at `path`.
    """
    try:
        stat = Path(path).stat()
        if stat.st_size > _HASHED_BYTES:
            return f"{stat.st_size} {stat.st_mtime_ns}"
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ABSENT


class ContentDigests:
    """Cache digests by a file's path, size and modification time, so that a file is hashed once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp | None, str]] = {}

    def of(self, path: str) -> str:
        """Return `content_digest(path)`."""
        stamp = _stamp(path)
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = stamp, content_digest(path)
        return known[1]


class ReadRecorder:
    """Record the files that this process opens for reading, using Python's audit events."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Stamp | None, str]] = {}
        self._written: set[str] = set()
        self._hook = threading.local()
        for module in list(sys.modules.values()):
            if source := getattr(module, "__file__", None):
                self._note(str(source), is_write=False)
        sys.addaudithook(self._audit)

    def files(self, *, apart_from: Sequence[str] = ()) -> dict[str, str] | None:
        """Return each file with the digest that it had when it was read.

        Files that this process wrote, files that were deleted since, and files in the folders
        `apart_from` are left out. A file that the process tried to open and that did not exist has
        the digest `ABSENT`.

        Returns:
            Path to digest; None if there are more than `MAX_FILES` files.
        """
        folders = tuple(os.path.realpath(folder) + os.sep for folder in apart_from if folder)
        found = {
            path: digest
            for path, (_stamp, digest) in self._found.items()
            if path not in self._written
            and not path.startswith(folders)
            and (digest == ABSENT or Path(path).exists())
        }
        return found if len(found) <= MAX_FILES else None

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or getattr(self._hook, "runs", False):
            return
        self._hook.runs = True
        try:
            path, _mode, flags = arguments
            if isinstance(path, str | bytes | os.PathLike):
                is_write = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
                self._note(os.fsdecode(path), is_write=is_write)
        except (OSError, ValueError):  # not a readable path
            pass
        finally:
            self._hook.runs = False

    def _note(self, path: str, *, is_write: bool) -> None:
        if path.endswith(".pyc"):
            try:
                path = importlib.util.source_from_cache(path)
            except ValueError:
                return
        if _is_of_a_package(path):  # the usual case; its links need no resolution
            return
        path = os.path.realpath(path)
        if is_write:
            self._written.add(path)
        elif (
            _is_of_a_package(path)
            or path.startswith(_NO_FILES)
            or (Path(path).exists() and not Path(path).is_file())
        ):
            return
        elif (before := self._found.get(path)) is None:
            self._found[path] = _stamp(path), content_digest(path)
        elif before[0] != _stamp(path):
            self._found[path] = before[0], CHANGED


@functools.cache
def package_versions() -> str:
    """Return a digest of the versions of Python and of all installed packages."""
    found = {path.name for folder in sys.path for path in Path(folder or ".").glob("*.dist-info")}
    text = "\n".join([sys.version, *sorted(found)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _stamp(path: str) -> Stamp | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


@functools.cache
def _package_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names}
    folders |= {one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")}
    folders.add(str(Path(__file__).parents[2]))  # Holdfast's own
    folders |= {os.path.realpath(folder) for folder in folders}
    return tuple(folder + os.sep for folder in sorted(folders))


def _is_of_a_package(path: str) -> bool:
    # Record the files of lm-eval's own tasks too, since users often edit these files in place.
    return path.startswith(_package_folders()) and _TASKS not in path
