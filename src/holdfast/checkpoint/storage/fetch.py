"""Fetch one checkpoint from object storage into a local folder.

The files are downloaded into a hidden folder and verified. Then the hidden folder is renamed.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from holdfast.checkpoint.catalog.catalog import verify
from holdfast.checkpoint.catalog.staging_dir import Staging
from holdfast.checkpoint.format.checksums import checksum_of_digests
from holdfast.checkpoint.format.manifest import (
    MANIFEST_NAME,
    FileEntry,
    ManifestError,
    check_file_contents,
)
from holdfast.checkpoint.format.paths import replaced_path, step_path
from holdfast.checkpoint.storage.catalog import RemoteCheckpoint, read_remote_manifest
from holdfast.checkpoint.storage.object_store import PART_BYTES, Objects, in_parallel
from holdfast.checkpoint.storage.ranges import sidecar_of
from holdfast.core.atomic import fsync_folder, write_atomic
from holdfast.core.errors import CheckpointError, DamagedCheckpoint, NotFound

_PARTS_AT_ONCE: Final = 8
_FILES_AT_ONCE: Final = 4
_ATTEMPTS: Final = 2
"""Attempts to download a file: bytes damaged in transit are likely right at the second attempt."""


def fetch(objects: Objects, checkpoint: RemoteCheckpoint, into: Path) -> Path:
    """Download and verify a checkpoint; see `Remote.fetch`."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(into).free
        if free_bytes < checkpoint.size_bytes:
            raise CheckpointError(
                f"Step {checkpoint.step} has {checkpoint.size_bytes:,} bytes, and {into} has {free_bytes:,} free. "
                "Free space there, or give another folder."
            )
        staging = Staging(into, checkpoint.step)
        try:
            _download(objects, checkpoint, staging.path)
            final = step_path(into, checkpoint.step)
            both = final.exists() and replaced_path(final).exists()
            return staging.commit(final_is_damaged=both and not _is_whole(final))
        except BaseException:
            staging.abandon()
            raise
    except ManifestError as error:
        raise DamagedCheckpoint(
            f"{checkpoint.url} is damaged: {error}. Fetch an earlier step; or delete this one there and push "
            "an undamaged copy."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Step {checkpoint.step} could not be written to {into} ({error.strerror}). Free space there or make it "
            "writable, or give another folder."
        ) from error


def _is_whole(path: Path) -> bool:
    try:
        return verify(path).state == "verified"
    except NotFound:  # deleted since the check for its existence
        return False


def _download(objects: Objects, checkpoint: RemoteCheckpoint, folder: Path) -> None:
    try:
        content, manifest = read_remote_manifest(objects, checkpoint.name, checkpoint.step)
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST_NAME} was deleted") from error
    files = manifest.files
    for entry in files:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / entry.path).open("xb") as file:
            file.truncate(entry.size_bytes)
    missing = list(files)
    for attempt in range(_ATTEMPTS):
        parts = [
            (entry, offset)
            for entry in missing
            for offset in range(0, entry.size_bytes, PART_BYTES)
        ]
        in_parallel(
            lambda part: _download_part(objects, checkpoint, folder, *part),
            parts,
            threads=_PARTS_AT_ONCE,
        )
        wrong = in_parallel(
            lambda entry: _settle(objects, folder, entry), missing, threads=_FILES_AT_ONCE
        )
        missing = [entry for entry, error in zip(missing, wrong, strict=True) if error is not None]
        if missing and attempt == _ATTEMPTS - 1:
            raise next(error for error in wrong if error is not None)
    in_parallel(
        lambda entry: _fetch_sidecar(objects, checkpoint, folder, entry),
        files,
        threads=_PARTS_AT_ONCE,
    )
    for parent in {(folder / entry.path).parent for entry in files}:
        fsync_folder(parent)
    write_atomic(folder / MANIFEST_NAME, content)


def _download_part(
    objects: Objects, checkpoint: RemoteCheckpoint, folder: Path, entry: FileEntry, offset: int
) -> None:
    length = min(PART_BYTES, entry.size_bytes - offset)
    try:
        data = objects.read_range(f"{checkpoint.name}/{entry.path}", offset, length)
    except FileNotFoundError as error:
        raise ManifestError(f"{entry.path} is missing") from error
    fd = os.open(folder / entry.path, os.O_WRONLY)
    try:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(fd)


def _fetch_sidecar(
    objects: Objects, checkpoint: RemoteCheckpoint, folder: Path, entry: FileEntry
) -> None:
    """Fetch the sidecar of a file, which holds the digests of the file's blocks.

    Sidecars are optional, so a missing or wrong sidecar is skipped.
    """
    if (sidecar := sidecar_of(entry)) is None:
        return
    try:
        digests = objects.read(f"{checkpoint.name}/{sidecar[0]}")
    except FileNotFoundError:
        return
    if checksum_of_digests(digests) == entry.checksum:
        write_atomic(folder / sidecar[0], digests)


def _settle(objects: Objects, folder: Path, entry: FileEntry) -> ManifestError | None:
    """Make a downloaded file durable; return an error if its content is wrong, else None."""
    fd = os.open(folder / entry.path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        check_file_contents(folder, [entry], objects.go_on)
    except ManifestError as error:
        return error
    return None
