"""Upload one local checkpoint to object storage.

The files are verified while they are read. The manifest is written last, so that an incomplete
upload is never taken for a checkpoint.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    checksum_of_digests,
    digests_of,
    whole_checksum,
)
from holdfast.checkpoint.format.manifest import (
    DAMAGED_JSON,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ManifestError,
    check_sizes,
    parse_manifest,
    unread,
)
from holdfast.checkpoint.format.paths import parse_name
from holdfast.checkpoint.storage.catalog import (
    RemoteCheckpoint,
    inspect_remote,
    parse_remote_name,
    remote_name,
    scan_remote,
)
from holdfast.checkpoint.storage.object_store import Objects, in_parallel
from holdfast.checkpoint.storage.ranges import by_blocks, sidecar_of
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, CheckpointError, DamagedCheckpoint, StorageFailed
from holdfast.core.rate_limit import RateLimit

ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Seconds after which superfluous objects are deleted, since no process uses them any more."""
FILES_AT_ONCE: Final = 4
_CHUNK_BYTES: Final = 64 * BLOCK_BYTES
_ROUNDS: Final = 3
_DATE_S: Final = 1.0
"""The resolution in seconds of the modification times that S3 reports."""
_logger = logging.getLogger("holdfast")


def push(
    objects: Objects, folder: Path, *, pace: RateLimit, now_s: float, sleep: Callable[[float], None]
) -> RemoteCheckpoint:
    """Upload a checkpoint; see `Remote.push`."""
    name = parse_name(folder.name)
    if name is None or not folder.is_dir():
        raise BadUse(f"{folder} is not a checkpoint. Give a folder of the name step-NUMBER.")
    step = name[0]
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise BadUse(
            f"{folder} has no manifest to read ({error.strerror}). Push a checkpoint that was saved completely."
        ) from error
    target = remote_name(step, content)
    try:
        manifest = parse_manifest(content, step=step)
        check_sizes(folder, manifest.files)
        _send_files(objects, folder, target, manifest, pace, now_s)
    except ManifestError as error:
        raise DamagedCheckpoint(
            f"{folder} is damaged and was not pushed: {error}. Save that step again."
        ) from error
    pushed = _commit(objects, target, step, content, sleep)
    try:
        tidy(objects, pushed)
    except CheckpointError as error:
        _logger.warning(
            "Step %d is pushed, but superfluous objects there were not deleted: %s", step, error
        )
    return pushed


def _send_files(
    objects: Objects, folder: Path, target: str, manifest: Manifest, pace: RateLimit, now_s: float
) -> None:
    """Upload the files that storage lacks, until a listing of the folder shows all of them."""

    def send(entry: FileEntry) -> None:
        digests = bytearray()
        objects.write(
            f"{target}/{entry.path}",
            lambda: _verified(folder, entry, pace, digests),
            entry.size_bytes,
        )
        if (sidecar := sidecar_of(entry)) is not None:
            objects.write(f"{target}/{sidecar[0]}", lambda: iter([bytes(digests)]), sidecar[1])

    for attempt in range(_ROUNDS):
        there = objects.list(target)
        if attempt or MANIFEST_NAME in there:
            trusted_since_s = 0.0
        elif objects.folder is not None:
            trusted_since_s = now_s  # on a disk, a crash may leave a file's size without its bytes
        else:
            # Another push may delete older objects at any moment.
            trusted_since_s = now_s - ABANDONED_AFTER_S / 2
        right = {
            (path, each.size_bytes)
            for path, each in there.items()
            if each.modified_at_s >= trusted_since_s
        }
        missing = [
            entry
            for entry in manifest.files
            if not {
                (entry.path, entry.size_bytes),
                sidecar_of(entry) or (entry.path, entry.size_bytes),
            }
            <= right
        ]
        if not missing:
            return
        missing.sort(key=lambda entry: -entry.size_bytes)
        in_parallel(send, missing, threads=FILES_AT_ONCE)
    raise StorageFailed(
        f"Objects written to {objects.url}/{target} disappear ({missing[0].path}). See who else writes or "
        "deletes there, then push again."
    )


def _verified(
    folder: Path, entry: FileEntry, pace: RateLimit, digests: bytearray
) -> Iterator[bytes]:
    """Yield the bytes of a file, and verify them against the checksum in the manifest.

    The error is raised after the last byte, before the upload is complete, so no object is made of
    wrong bytes. If the checksum is made of block digests, these are stored in `digests`.

    Raises:
        ManifestError: the bytes do not match the manifest, or cannot be read.
    """
    digests.clear()
    blocks, whole = by_blocks(entry), xxhash.xxh3_128()
    try:
        with (folder / entry.path).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                if blocks:
                    digests += digests_of(memoryview(chunk))
                else:
                    whole.update(chunk)
                pace.wait(len(chunk))
                yield chunk
    except OSError as error:
        raise unread(entry.path, error) from error
    if entry.checksum != (
        checksum_of_digests(bytes(digests)) if blocks else whole_checksum(whole.hexdigest())
    ):
        raise ManifestError(f"{entry.path} does not match its checksum")


def _commit(
    objects: Objects, target: str, step: int, content: bytes, sleep: Callable[[float], None]
) -> RemoteCheckpoint:
    """Write the manifest into a complete folder, so that this save is the newest of its step.

    Storage may already hold this manifest and, committed later, another save of the step. The
    manifest is then written again, to become the newer one.
    """
    for attempt in range(_ROUNDS):
        newest = scan_remote(objects, step)[:1]
        if newest and newest[0].name == target and newest[0].state == "written":
            return newest[0]
        if attempt:
            sleep(_DATE_S)
        objects.write(f"{target}/{MANIFEST_NAME}", lambda: iter([content]), len(content))
    pushed = inspect_remote(objects, target, objects.list(target))
    if pushed is None or pushed.state != "written":
        raise StorageFailed(
            f"{objects.url}/{target} was deleted while it was pushed. Push it again."
        )
    return pushed


def tidy(objects: Objects, pushed: RemoteCheckpoint) -> None:
    """Delete objects that have been superfluous for a day: replaced saves and unfinished uploads.

    Interrupted deletions are completed, too. All dates come from the storage's clock, so wrong
    clocks of other machines do no harm.

    Raises:
        NotFound, StorageFailed: see `Objects`.
    """
    before_s = pushed.committed_at_s - ABANDONED_AFTER_S
    folders = {
        name: objects.list(name)
        for name in objects.folders()
        if parse_remote_name(name) is not None
    }
    committed_at_s = {
        name: there[MANIFEST_NAME].modified_at_s
        for name, there in folders.items()
        if MANIFEST_NAME in there
    }

    def is_replaced(name: str) -> bool:
        after_s = committed_at_s[name]
        return any(
            after_s < at_s < before_s
            and parse_remote_name(other) == parse_remote_name(name)
            and (found := inspect_remote(objects, other, folders[other])) is not None
            and found.state == "written"
            for other, at_s in committed_at_s.items()
        )

    for name, there in folders.items():
        newest_s = max((each.modified_at_s for each in there.values()), default=before_s)
        if is_replaced(name) if name in committed_at_s else newest_s < before_s:
            objects.delete_folder(name, there, first=MANIFEST_NAME)


# The file `.holdfast-pushed` in a checkpoint folder lists all pushes from that folder, complete or
# begun. If storage has a checkpoint that the folder lacks, the list shows why. A listed checkpoint
# was deleted from the folder and must not be fetched again. Any other checkpoint was never in the
# folder.

PUSHED_NAME = ".holdfast-pushed"
_MAX_NAMES: Final = 10_000
"""The limit on listed names for each storage; steps that are no longer listed may be fetched."""


def pushed_names(folder: Path, url: str) -> list[str]:
    """Return the storage names of the checkpoints that were pushed from `folder` to `url`.

    If the record of pushes is unreadable, a warning is logged and the result is empty.
    """
    try:
        return _parse(folder).get(url, [])
    except (OSError, *DAMAGED_JSON) as error:
        _logger.warning(
            "The record of pushes from %s cannot be read (%s: %s).",
            folder,
            PUSHED_NAME,
            error,
        )
        return []


def note_pushed(folder: Path, url: str, name: str) -> None:
    """Record that the checkpoint `name` in storage was pushed from `folder` to `url`.

    Raises:
        OSError: the record of pushes could not be read or written.
    """
    try:
        pushed = _parse(folder)
    except DAMAGED_JSON as error:
        _logger.warning(
            "The record of pushes from %s is started over: %s is damaged (%s).",
            folder,
            PUSHED_NAME,
            error,
        )
        pushed = {}
    names = pushed.get(url, [])
    if name not in names:
        pushed[url] = sorted([*names, name])[-_MAX_NAMES:]
        write_atomic(folder / PUSHED_NAME, json.dumps(pushed).encode() + b"\n")


def _parse(folder: Path) -> dict[str, list[str]]:
    try:
        content = json.loads((folder / PUSHED_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return {str(url): [str(name) for name in names] for url, names in content.items()}
