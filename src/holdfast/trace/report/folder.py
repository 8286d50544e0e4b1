"""Replace a folder atomically.

After a crash at any time, the folder's name refers either to the complete old folder or to the
complete new one. A crash may also leave a folder `.NAME.*.tmp` beside it, which is never read. Some
network file systems cannot exchange two folders in one step. On these, a crash between the two
renames leaves the old folder under the name `.NAME.*.old`.
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
"""The flag RENAME_EXCHANGE of renameat2(2), from <linux/fs.h>."""


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder, which replaces `folder` when the `with` block ends.

    If the block raises an exception, nothing is replaced.

    Raises:
        OSError: a write failed; `folder` is unchanged.
    """
    # Resolve links, so that the folder is replaced and not a link to it.
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
            # The error of a write by a descriptor, as on a full disk, has no file name.
            error.filename = str(folder)
        raise
    finally:
        # This is the new folder after a failure, the old folder after a replacement; else nothing.
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
    """Exchange two folders in one step, or in two steps if the file system does not support one."""
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
