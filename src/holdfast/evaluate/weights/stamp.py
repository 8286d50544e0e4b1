"""Recognize the files of a model without reading the files.

A stamp covers each file's inode, size and times. A program that writes a file, replaces the file,
or sets the file's modification time changes the inode or the change time, and no program can set
the change time. So equal stamps mean equal bytes, with one exception: a file may be written twice
within one step of the file system's clock. A stamp is settled if its newest file is older than one
such step.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from holdfast.evaluate.types.model_manifest import ModelManifest

SETTLED_AFTER_S = 2.0
"""The longest clock step of the file systems in use: 2 s for FAT; ext4 and XFS have 4 ms."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The stamp of a model's files at one time, to be compared with other stamps."""

    text: str
    is_settled: bool


def stamp_of(manifest: ModelManifest, now_s: float) -> Stamp | None:
    """Return the stamp of a model's files.

    Args:
        manifest: the model.
        now_s: the present time in seconds since 1970.

    Returns:
        The stamp; None if the model is not a folder on this machine, or if a file is missing.
    """
    checksum = hashlib.blake2b(manifest.fingerprint(), digest_size=16)
    newest_ns = 0
    for file in manifest.files:
        try:
            folder, path = manifest.place_of(file.path)
            # Open each file, since NFS may answer a stat from a cache that is a minute old, while
            # opening asks the server. Do not block if the file is a pipe.
            descriptor = os.open(Path(folder) / path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        parts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        checksum.update(f"{file.path}\0{parts}\n".encode())
        newest_ns = max(newest_ns, found.st_mtime_ns, found.st_ctime_ns)
    is_settled = now_s - newest_ns / 1e9 >= SETTLED_AFTER_S
    return Stamp(text=checksum.hexdigest(), is_settled=is_settled)
