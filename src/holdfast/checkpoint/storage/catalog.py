"""List the checkpoints in object storage, and check whether each is whole.

To check a checkpoint, only its manifest and the sizes of its objects are read, not its data.

    URL/step-0000000020.3fa29c1b22d04e91/.metadata, __0_0.distcp, …, holdfast.json

A folder's name ends with the digest of its manifest, and the manifest determines every byte in the
folder. So if two processes write into one folder, they write the same bytes, and a reader never
finds files of two saves in one folder. The manifest is written last, so a folder without a manifest
is not a checkpoint.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from holdfast.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    parse_manifest,
)
from holdfast.checkpoint.format.paths import parse_name, step_path
from holdfast.checkpoint.storage.object_store import Objects, StoredObject, in_parallel

_NAME = re.compile(r"(step-\d{10,})\.([0-9a-f]{16})")
_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """Describe one checkpoint in object storage.

    Attributes:
        step: the training step.
        name: the name of the folder.
        url: the URL of the folder, which other software can read, too.
        state: `written` if the manifest and all sizes are right, else `damaged`.
        committed_at_s: when the manifest was written, by the storage's clock, in seconds since the
            Unix epoch.
        manifest: the checkpoint's manifest; None if it is unreadable.
        reason: a description of the damage; None if there is none.
    """

    step: int
    name: str
    url: str
    state: Literal["written", "damaged"]
    committed_at_s: float
    manifest: Manifest | None = None
    reason: str | None = None

    @property
    def size_bytes(self) -> int:
        """Return the total size of all files in bytes; 0 if the manifest is unreadable."""
        return self.manifest.size_bytes if self.manifest else 0

    @property
    def created_at_s(self) -> float | None:
        """Return the time of the save in seconds since the Unix epoch; None if it is unknown."""
        return self.manifest.created_at_s if self.manifest else None


def remote_name(step: int, manifest: bytes) -> str:
    """Return the storage folder's name for the checkpoint of `step` with these manifest bytes."""
    return f"{step_path(Path(), step).name}.{xxhash.xxh3_64_hexdigest(manifest)}"


def parse_remote_name(name: str) -> int | None:
    """Return the step in the name of a storage folder; None if it is not a checkpoint's name."""
    match = _NAME.fullmatch(name)
    found = parse_name(match[1]) if match else None
    return found[0] if found else None


def scan_remote(
    objects: Objects, step: int | None = None, *, above: int = -1
) -> list[RemoteCheckpoint]:
    """List the checkpoints of `step`, or of all steps above `above`, newest step first.

    Of several checkpoints of one step, the one committed last comes first.

    Raises:
        NotFound, StorageFailed: see `Objects`.
    """
    names = [
        name
        for name in objects.folders()
        if (of := parse_remote_name(name)) is not None and of > above and step in (None, of)
    ]
    found = in_parallel(
        lambda name: inspect_remote(objects, name, objects.list(name)), names, threads=_THREADS
    )
    there = [checkpoint for checkpoint in found if checkpoint is not None]
    return sorted(there, key=lambda each: (each.step, each.committed_at_s, each.name), reverse=True)


def inspect_remote(
    objects: Objects, name: str, there: dict[str, StoredObject]
) -> RemoteCheckpoint | None:
    """Describe the checkpoint in one remote folder; return None if the folder holds no checkpoint.

    Args:
        objects: the bucket and prefix that contain the folder.
        name: the name of the folder.
        there: the objects in the folder, by their names relative to the folder.

    Raises:
        NotFound, StorageFailed: see `Objects`.
    """
    step = parse_remote_name(name)
    if step is None or MANIFEST_NAME not in there:
        return None
    manifest, reason = None, None
    try:
        _, manifest = read_remote_manifest(objects, name, step)
        _check_sizes(manifest, there)
    except FileNotFoundError:  # deleted since the folder was listed
        return None
    except ManifestError as error:
        reason = str(error)
    return RemoteCheckpoint(
        step=step,
        name=name,
        url=f"{objects.url}/{name}",
        state="damaged" if reason else "written",
        committed_at_s=there[MANIFEST_NAME].modified_at_s,
        manifest=manifest,
        reason=reason,
    )


def read_remote_manifest(objects: Objects, name: str, step: int) -> tuple[bytes, Manifest]:
    """Return the bytes of a folder's manifest, and the parsed manifest.

    Raises:
        FileNotFoundError: there is no manifest.
        ManifestError: the manifest has changed since it was uploaded, or cannot be parsed; see
            `parse_manifest`.
        NotFound, StorageFailed: see `Objects`.
    """
    content = objects.read(f"{name}/{MANIFEST_NAME}")
    if remote_name(step, content) != name:
        raise ManifestError(f"{MANIFEST_NAME} differs from the pushed one")
    return content, parse_manifest(content, step=step)


def _check_sizes(manifest: Manifest, there: dict[str, StoredObject]) -> None:
    for entry in manifest.files:
        if entry.path not in there:
            raise ManifestError(f"{entry.path} is missing")
        if there[entry.path].size_bytes != entry.size_bytes:
            raise ManifestError(
                f"{entry.path} has {there[entry.path].size_bytes} bytes instead of {entry.size_bytes}"
            )
