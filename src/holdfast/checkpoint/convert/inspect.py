"""List the files, tensors and entries of a checkpoint that Holdfast or DCP wrote."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint.catalog.annotations import LOCK_NAME, MARKS_NAME
from holdfast.checkpoint.catalog.catalog import checkpoint_step
from holdfast.checkpoint.convert.plain_dcp import check_whole, file_sizes, verify_plain_dcp
from holdfast.checkpoint.format.checksums import SIDECAR_SUFFIX
from holdfast.checkpoint.format.dcp_metadata import METADATA_NAME, read_dcp_metadata
from holdfast.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    UnreadError,
    check_file_contents,
    check_sizes,
    read_manifest,
)
from holdfast.checkpoint.format.verified_files import VerifiedFiles
from holdfast.core.errors import CheckpointError, NotFound

_BESIDE = (MANIFEST_NAME, MARKS_NAME, f"{MARKS_NAME}.damaged", LOCK_NAME)
"""Files in a checkpoint's folder that hold no saved data; sidecars hold none, either."""


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """Hold the metadata of a checkpoint.

    Attributes:
        path: the folder of the checkpoint.
        manifest: the manifest; None if DCP wrote the checkpoint.
        metadata: the metadata of DCP.
        files: the sizes of the data files in bytes, by relative path.
    """

    path: Path
    manifest: Manifest | None
    metadata: Metadata
    files: dict[str, int]

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None if `name` is a plain value."""
        saved = self.metadata.state_dict_metadata[name]
        return saved if isinstance(saved, TensorStorageMetadata) else None

    def files_of(self, name: str) -> list[str]:
        """Return the names of the files that hold the tensor or value with this name."""
        saved = self.tensor(name)
        parts = (
            [MetadataIndex(name)]
            if saved is None
            else [MetadataIndex(name, each.offsets) for each in saved.chunks]
        )
        return sorted({str(self.metadata.storage_data[part].relative_path) for part in parts})

    def entry_of(self, name: str) -> str:
        """Return the top-level entry of the state to which the tensor or value belongs."""
        paths: Any = self.metadata.planner_data
        path = paths.get(name) if isinstance(paths, dict) else None
        return str(path[0]) if path else name.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Describe one whole tensor, even if its parts were saved by several ranks."""

    name: str
    entry: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class EntryTotal:
    """Count the tensors and plain values of a top-level entry, and the bytes of its tensors."""

    entry: str
    tensors: int
    plain_values: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointInventory:
    """List the content of a checkpoint; tensors and entries are sorted by name."""

    tensors: list[Tensor]
    plain_values: list[str]
    entries: list[EntryTotal]


def open_for_reading(path: Path) -> OpenedCheckpoint:
    """Read a checkpoint's metadata without running code from it, and check it against the files.

    Raises:
        NotFound: there is no checkpoint; the message describes the folder.
        CheckpointError: the checkpoint is damaged or cannot be read; the message gives the reason.
    """
    if not path.is_dir():
        raise NotFound(f"There is no checkpoint {path}. Give the folder of one step.")
    if not (path / METADATA_NAME).is_file() and not (path / MANIFEST_NAME).is_file():
        steps = sorted(each.parent for each in path.glob(f"step-*/{METADATA_NAME}"))
        hint = (
            f"The folder has checkpoints: give one of them, such as {steps[-1]}."
            if steps
            else "Give the folder of one step."
        )
        raise NotFound(f"{path} is not a checkpoint: it has no {METADATA_NAME}. {hint}")
    try:
        files = {
            name: size_bytes
            for name, size_bytes in file_sizes(path).items()
            if not _is_beside(name)
        }
        manifest = _manifest(path)
        if manifest is not None:
            check_sizes(path, manifest.files)
            check_file_contents(
                path, [entry for entry in manifest.files if entry.path == METADATA_NAME]
            )
        metadata = read_dcp_metadata(path)
        check_whole(metadata, files)
    except (ManifestError, OSError) as error:
        raise _refusal(path, error) from error
    return OpenedCheckpoint(path=path, manifest=manifest, metadata=metadata, files=files)


@contextmanager
def reading_verified(opened: OpenedCheckpoint) -> Iterator[VerifiedFiles | None]:
    """Yield a reader that verifies each block; yield None for a checkpoint that DCP wrote.

    A checkpoint of DCP is checked as a whole before the block begins.

    Raises:
        CheckpointError: the checkpoint is damaged or cannot be read; the message gives the reason.
    """
    if opened.manifest is None:
        found = verify_plain_dcp(opened.path)
        if found.state == "damaged":
            raise CheckpointError(
                f"{opened.path} is damaged: {found.reason}. Take another checkpoint."
            )
        yield None
        return
    try:
        yield VerifiedFiles(opened.path, opened.manifest.files)
    except ManifestError as error:
        raise _refusal(opened.path, error) from error


def take_inventory(opened: OpenedCheckpoint) -> CheckpointInventory:
    """List the content of an open checkpoint, without reading further files."""
    tensors, plain_values = [], []
    totals: dict[str, list[int]] = {}
    for name in sorted(opened.metadata.state_dict_metadata):
        entry = opened.entry_of(name)
        total = totals.setdefault(entry, [0, 0, 0])
        saved = opened.tensor(name)
        if saved is None:
            plain_values.append(name)
            total[1] += 1
            continue
        dtype = saved.properties.dtype
        tensors.append(
            Tensor(
                name=name,
                entry=entry,
                dtype=str(dtype).removeprefix("torch."),
                shape=tuple(saved.size),
                size_bytes=math.prod(saved.size) * dtype.itemsize,
                files=opened.files_of(name),
            )
        )
        total[0] += 1
        total[2] += tensors[-1].size_bytes
    entries = [
        EntryTotal(entry=entry, tensors=count, plain_values=plain, size_bytes=size_bytes)
        for entry, (count, plain, size_bytes) in sorted(totals.items())
    ]
    return CheckpointInventory(tensors=tensors, plain_values=plain_values, entries=entries)


def _refusal(path: Path, error: ManifestError | OSError) -> CheckpointError:
    if isinstance(error, UnreadError | OSError):
        return CheckpointError(
            f"{path} cannot be read: {error}. Try again, or take another checkpoint."
        )
    return CheckpointError(f"{path} is damaged: {error}. Take another checkpoint.")


def _is_beside(name: str) -> bool:
    return name in _BESIDE or name.endswith(SIDECAR_SUFFIX)


def _manifest(path: Path) -> Manifest | None:
    step = checkpoint_step(path)
    if step is None or not (path / MANIFEST_NAME).is_file():
        return None
    return read_manifest(path, step=step)
