"""Write files that are whole or absent.

A crash at any moment leaves either the old file or the new file, never a mixture. A crash may also
leave a temporary file `.NAME.*.tmp` in the same folder, which no code reads.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the creation, renaming and removal of files in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; after the block, rename the file to `path`, durably.

    The temporary file is in the folder of `path`. After the block the file is fsynced and renamed,
    and the folder is fsynced. An exception in the block deletes the temporary file. Use
    `write_atomic` for bytes that fit in memory.

    Raises:
        FileExistsError: `path` is neither a regular file nor a folder, for example a device or a
            pipe.
        OSError: the write failed, and `path` is unchanged. If only the last fsync failed, `path`
            holds the new file, but a power cut may bring the old file back.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "It is not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
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
            # The caller knows `path` only, and the error of a full disk names no file at all.
            error.filename = str(path)
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` durably, in place of an earlier file.

    The file has the permissions that the umask allows.

    Raises:
        OSError: see `replacing`.
    """
    # Not tempfile.mkstemp, which ignores the umask and creates files of mode 0600: other users read
    # reports and checkpoints, too.
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
