"""Which checkpoints lie in object storage, and whether each is whole. Reads manifests and sizes, no data.

    URL/step-0000000020.3fa29c1b22d04e91/.metadata, __0_0.distcp, …, holdfast.json

A folder's name ends with the digest of its manifest, and so says what every byte in it has to be: whoever writes there
writes the same, and no reader can meet files of two saves in one folder. The manifest goes there last; without it a
folder is no checkpoint.
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
    """One checkpoint in object storage.

    `url`: its folder, as stock readers take it. `state`: `written` (manifest and sizes are right) or `damaged`; then
    `reason` says why. `manifest`: None where it is unreadable. `committed_at_s`: when it became a checkpoint, by the
    storage's clock, in seconds since the Unix epoch.
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
        """Bytes of its files together; 0 where the manifest is unreadable."""
        return self.manifest.size_bytes if self.manifest else 0

    @property
    def created_at_s(self) -> float | None:
        """When it was saved, in seconds since the Unix epoch."""
        return self.manifest.created_at_s if self.manifest else None


def remote_name(step: int, manifest: bytes) -> str:
    """The name of the folder for the checkpoint of `step` that has `manifest`."""
    return f"{step_path(Path(), step).name}.{xxhash.xxh3_64_hexdigest(manifest)}"


def parse_remote_name(name: str) -> int | None:
    """The step of a folder in storage; None where its name is not of a checkpoint."""
    match = _NAME.fullmatch(name)
    found = parse_name(match[1]) if match else None
    return found[0] if found else None


def scan_remote(
    objects: Objects, step: int | None = None, *, above: int = -1
) -> list[RemoteCheckpoint]:
    """The checkpoints there (of `step`, or later than `above`), newest first; of one step, committed last first.

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
    """Look at one folder, in which `there` lies; None where it is no checkpoint.

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
    except FileNotFoundError:  # deleted since it was listed
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
    """The manifest of a folder, as it is and read.

    Raises:
        FileNotFoundError: there is none.
        ManifestError: it is not what it was, or as `parse_manifest`.
        NotFound, StorageFailed: see `Objects`.
    """
    content = objects.read(f"{name}/{MANIFEST_NAME}")
    if remote_name(step, content) != name:
        raise ManifestError(f"{MANIFEST_NAME} is not the one that it was pushed with")
    return content, parse_manifest(content, step=step)


def _check_sizes(manifest: Manifest, there: dict[str, StoredObject]) -> None:
    for entry in manifest.files:
        if entry.path not in there:
            raise ManifestError(f"{entry.path} is missing")
        if there[entry.path].size_bytes != entry.size_bytes:
            raise ManifestError(
                f"{entry.path} has {there[entry.path].size_bytes} bytes instead of {entry.size_bytes}"
            )
