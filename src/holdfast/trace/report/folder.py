"""A folder written whole or not at all.

A crash at any instant leaves the old folder or the new one under the name, never a mixture; what it can leave besides
is a `.NAME.*.tmp` folder beside it, which nobody reads. Where the file system cannot exchange two folders (some
network file systems), a crash between two renames leaves the old one as `.NAME.*.old`.
"""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.atomic import fsync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""From <fcntl.h> and <linux/fs.h>: renameat2(2)."""


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new empty folder to write into, which takes the place of `folder` when the block ends well.

    Raises:
        OSError: something could not be written; `folder` is as it was.
    """
    # Through a link, so that the folder it leads to is replaced and not the link.
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _durable(temporary)
        if folder.exists():
            _exchange(temporary, folder)
        else:
            temporary.rename(folder)
        fsync_folder(folder.parent)
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(
                folder
            )  # a write by a descriptor, as on a full disk, knows no name
        raise
    finally:
        # The new one where something failed; the old one where it was replaced; nothing where there was none.
        shutil.rmtree(temporary, ignore_errors=True)


def _durable(folder: Path) -> None:
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            fd = os.open(Path(place, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_folder(Path(place))


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders' names in one step; where the file system cannot, in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(
            _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
        ):
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(old))
    aside = new.with_suffix(".old")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)
