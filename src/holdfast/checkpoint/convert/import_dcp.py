"""Import a checkpoint that PyTorch Distributed Checkpoint (DCP) wrote.

The files are copied and checked, and a manifest is added.
"""

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from holdfast.checkpoint.catalog.catalog import Progress
from holdfast.checkpoint.catalog.staging_dir import Staging
from holdfast.checkpoint.convert.inspect import OpenedCheckpoint, open_for_reading
from holdfast.checkpoint.convert.plain_dcp import is_transformed, verify_plain_dcp
from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    checksum_of_digests,
    digests_of,
    write_sidecar,
)
from holdfast.checkpoint.format.manifest import FileEntry, Manifest, describe_file, write_manifest
from holdfast.checkpoint.format.paths import METADATA_NAME, step_path
from holdfast.checkpoint.state.capture import STRUCTURE
from holdfast.core.arguments import check_whole
from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import BadUse, DamagedCheckpoint

_DATA_FILE: Final = re.compile(r"__(\d+)_\d+\.distcp")
"""The names that DCP gives to data files; the group is the rank that wrote the file."""
_CHUNK_BYTES: Final = 64 * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Describe an imported checkpoint; `unchecked` lists values without a checksum, or is empty."""

    path: Path
    size_bytes: int
    unchecked: str


def import_dcp(
    source: Path, folder: Path, step: int, *, progress: Progress = lambda _done, _total: None
) -> Imported:
    """Copy a checkpoint of DCP into a folder of checkpoints, where `Checkpointer.restore` finds it.

    The copy appears only when it is complete, and keeps the time of the save. Values without a
    checksum are copied without a check, and the result reports them.

    Args:
        source: the folder that DCP wrote; it is only read.
        folder: the folder of Holdfast's checkpoints; made if missing.
        step: the step of the checkpoint, which DCP does not record.
        progress: called with the number of bytes copied and checked so far and the total.

    Raises:
        NotFound: there is no checkpoint at `source`.
        BadUse: the source is a checkpoint of Holdfast, or was written with an extension of DCP; or
            `folder` has a checkpoint of this step.
        CheckpointError: the source is damaged.
        OSError: the source cannot be read, or the copy cannot be written.
    """
    step = check_whole("step", step, least=0)
    opened = open_for_reading(source)
    if opened.manifest is not None:
        raise BadUse(
            f"{source} is already a checkpoint of Holdfast. Copy its folder, and keep the folder's name."
        )
    if STRUCTURE in opened.metadata.state_dict_metadata:
        raise BadUse(
            f"Holdfast wrote {source}, and its manifest is missing: a save or a copy did not "
            "finish. Take another."
        )
    if any(map(is_transformed, opened.metadata.storage_data.values())):
        raise BadUse(
            f"{source} was written with an extension of PyTorch's, such as one that compresses, "
            "which Holdfast cannot read. Load it with the extension, and save it without."
        )
    if step_path(folder, step).exists():  # check before the copy, which takes long
        raise BadUse(
            f"There is a checkpoint {step_path(folder, step)} already. Give another step or "
            "another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    staging = Staging(folder, step)
    try:
        manifest, unchecked = _fill(staging.path, opened, step, progress)
        write_manifest(staging.path, manifest)
        path = staging.commit(replaces=False)  # another process may have made the checkpoint
    except BaseException:
        staging.abandon()
        raise
    return Imported(path=path, size_bytes=manifest.size_bytes, unchecked=unchecked)


def _fill(
    folder: Path, opened: OpenedCheckpoint, step: int, progress: Progress
) -> tuple[Manifest, str]:
    """Copy the files that the metadata names, and check the copies.

    Returns:
        The manifest; and a description of the values without a checksum, empty if there are none.
    """
    names = sorted({str(stored.relative_path) for stored in opened.metadata.storage_data.values()})
    size_bytes = sum(opened.files[name] for name in names)
    done_bytes = 0

    def copied(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, 2 * size_bytes)

    files = [_copy(opened.path, folder, name, copied) for name in names]
    _copy_bytes(opened.path / METADATA_NAME, folder / METADATA_NAME)
    # Check the copy and not the source, since the copy will be restored.
    checked = verify_plain_dcp(
        folder, progress=lambda done, _total: progress(size_bytes + done, 2 * size_bytes)
    )
    if checked.state == "damaged":
        raise DamagedCheckpoint(
            f"{opened.path} is damaged: {checked.reason}. Take another checkpoint."
        )
    manifest = Manifest(
        step=step,
        world_size=max(
            (int(match[1]) + 1 for match in map(_DATA_FILE.fullmatch, names) if match), default=1
        ),
        created_at_s=(opened.path / METADATA_NAME).stat().st_mtime,
        torch=str(torch.__version__),
        save=secrets.token_hex(4),
        files=(describe_file(folder, METADATA_NAME), *files),
    )
    return manifest, "" if checked.state == "checked" else checked.reason


def _copy(source: Path, target: Path, name: str, copied: Callable[[int], None]) -> FileEntry:
    """Copy one data file and write its sidecar, so that both are durable."""
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    size_bytes, digests = _copy_bytes(source / name, path, copied)
    write_sidecar(path, digests)
    fsync_folder(path.parent)
    return FileEntry(path=name, size_bytes=size_bytes, checksum=checksum_of_digests(digests))


def _copy_bytes(
    source: Path, target: Path, copied: Callable[[int], None] = lambda _: None
) -> tuple[int, bytes]:
    """Copy a file durably; return its size and the digests of its blocks."""
    digests = []
    with source.open("rb") as read, target.open("xb") as written:
        while data := read.read(_CHUNK_BYTES):
            written.write(data)
            digests.append(digests_of(memoryview(data)))
            copied(len(data))
        written.flush()
        os.fsync(written.fileno())
        return written.tell(), b"".join(digests)
