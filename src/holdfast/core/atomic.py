"""Files that are whole or absent.

A crash at any instant leaves the old file or the new one, never a mixture; what it can leave besides is a
`.NAME.*.tmp` file in the same folder, which nobody reads and which the next write of that name does not mind.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (creations, renames, removals)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write a file at, which becomes `path`, durably, if the block ends well.

    Same-folder temporary file, fsync, rename, fsync of the folder. For what writes files itself, or more than memory
    holds.

    Raises:
        FileExistsError: `path` is a device, a pipe or the like, in whose place no file should be put.
        OSError: the write failed (of `path`, where the error names no other file); `path` is as it was before, or,
            where only the last fsync (of the folder) failed, holds the new file but may be as before after a power cut.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "It is no regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(
                path
            )  # the name that whoever reads it knows; a full disk's error has none at all
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by a file that holds exactly `data`, durably, readable by whom the umask says.

    Raises:
        OSError: as `replacing`.
    """
    # Not tempfile.mkstemp: its files are 0600 whatever the umask, and a report or a checkpoint is there to be
    # read by others.
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
