"""Check a checkpoint that PyTorch Distributed Checkpoint (DCP) wrote without Holdfast.

Such a checkpoint has no manifest, and its metadata has no checksum. The metadata is unpickled with
a list of allowed names, and must agree with the files. Each value is a ZIP archive, and most of its
records have a CRC-32 (`torch_blobs`).
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint.catalog.annotations import Annotations
from holdfast.checkpoint.catalog.catalog import Progress
from holdfast.checkpoint.format.dcp_metadata import check_metadata_against_files, read_dcp_metadata
from holdfast.checkpoint.format.manifest import ManifestError
from holdfast.checkpoint.format.torch_blobs import BlobError, check_blob
from holdfast.checkpoint.state.capture import STRUCTURE


@dataclass(frozen=True, kw_only=True)
class PlainDcpInfo:
    """Describe the result of checking a checkpoint without a manifest.

    Attributes:
        path: the folder of the checkpoint.
        state: `damaged` if damage was found; `checked` if every value matches its CRC-32;
            `unverifiable` if some values have no checksum, and no damage was found.
        size_bytes: the total size of all files.
        reason: an explanation of `state`.
        step: always None, since DCP records no step.
        created_at_s: always None, since DCP records no time.
        marks: always empty.
    """

    path: Path
    state: Literal["checked", "unverifiable", "damaged"]
    size_bytes: int
    reason: str
    step: None = None
    created_at_s: None = None
    marks: Annotations = field(default_factory=Annotations)


def is_plain_dcp(path: Path) -> bool:
    """Return True if DCP wrote the checkpoint without Holdfast.

    The folder has no manifest, which can also mean that Holdfast's manifest was lost.
    """
    try:
        return STRUCTURE not in read_dcp_metadata(path).state_dict_metadata
    except ManifestError:
        return True  # `verify_plain_dcp` reports the damage


def verify_plain_dcp(
    path: Path, *, progress: Progress = lambda _done, _total: None
) -> PlainDcpInfo:
    """Read and check all files of a checkpoint that DCP wrote without Holdfast."""
    sizes_bytes = file_sizes(path)
    size_bytes = sum(sizes_bytes.values())
    try:
        metadata = read_dcp_metadata(path)
        _check_plain_dcp(metadata)
        check_whole(metadata, sizes_bytes)
        unchecked, values = _check_blobs(path, metadata, progress)
    except (ManifestError, OSError) as error:
        return PlainDcpInfo(path=path, state="damaged", size_bytes=size_bytes, reason=str(error))
    if unchecked:
        reason = f"structure ok, but {unchecked} of {values} values have no checksum, so their bits cannot be checked"
        return PlainDcpInfo(path=path, state="unverifiable", size_bytes=size_bytes, reason=reason)
    reason = "every value matches its CRC-32; without a manifest the metadata has no checksum"
    return PlainDcpInfo(path=path, state="checked", size_bytes=size_bytes, reason=reason)


def _check_plain_dcp(metadata: Metadata) -> None:
    if STRUCTURE in metadata.state_dict_metadata:
        raise ManifestError("Holdfast wrote it, and its manifest is missing")


def file_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in bytes of a checkpoint's files, by relative path."""
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return {
        file.relative_to(path).as_posix(): file.stat().st_size for file in files if file.is_file()
    }


def check_whole(metadata: Metadata, sizes_bytes: dict[str, int]) -> None:
    """Check that the metadata is consistent, and that the files have room for all its values.

    Every element of every tensor must be stored, and no two values may overlap. No value is read.

    Raises:
        ManifestError: the check failed; the message names the tensor or value.
    """
    try:
        check_metadata_against_files(metadata, sizes_bytes)
        _check_names(metadata)
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                _check_tensor(name, saved)
        for index, needed_bytes in _needed_bytes(metadata).items():
            stored = metadata.storage_data[index]
            if stored.length < needed_bytes and not is_transformed(stored):
                raise ManifestError(
                    f"{index.fqn!r} has {stored.length} of its {needed_bytes} bytes in a file"
                )
        ends: dict[str, tuple[int, str]] = {}
        for file, offset, length, index in sorted(_places(metadata), key=lambda place: place[:3]):
            if file not in sizes_bytes:
                raise ManifestError(
                    f"{index.fqn!r} lies in {file}, which is not a file of the checkpoint"
                )
            end, before = ends.get(file, (0, ""))
            if offset < end:
                raise ManifestError(f"{index.fqn!r} and {before!r} overlap in {file}")
            ends[file] = offset + length, index.fqn
    # Forged metadata may raise any of these errors.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ManifestError(f"its metadata is not valid ({error})") from error


def _check_names(metadata: Metadata) -> None:
    paths: Any = metadata.planner_data
    names = [*metadata.state_dict_metadata, *(paths or ())]
    if not all(isinstance(name, str) for name in names):
        raise ManifestError("its metadata has a name that is not text")
    if paths and not all(_is_place(path) for path in paths.values()):
        raise ManifestError("its metadata has a name whose path is not valid")


def _is_place(path: Any) -> bool:
    return (
        isinstance(path, tuple | list)
        and bool(path)
        and all(isinstance(part, str | int) for part in path)
    )


def is_transformed(stored: Any) -> bool:
    """Return True if an extension of DCP has changed the stored bytes, such as by compression."""
    return bool(getattr(stored, "transform_descriptors", None))


def _check_tensor(name: str, saved: TensorStorageMetadata) -> None:
    written = 0
    for chunk in saved.chunks:
        if len(chunk.sizes) != len(saved.size) or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, saved.size, strict=True)
        ):
            raise ManifestError(f"a part of {name!r} lies outside of its shape")
        written += math.prod(chunk.sizes)
    if written < math.prod(saved.size):
        raise ManifestError(
            f"{name!r} is not whole: {written} of its {math.prod(saved.size)} values were written"
        )


def _places(metadata: Metadata) -> Iterator[tuple[str, int, int, MetadataIndex]]:
    for index, stored in metadata.storage_data.items():
        yield str(stored.relative_path), stored.offset, stored.length, index


def _check_blobs(path: Path, metadata: Metadata, progress: Progress) -> tuple[int, int]:
    """Read and check all values.

    Returns:
        The number of values without a checksum, and the number of all values.
    """
    needed_bytes = _needed_bytes(metadata)
    total_bytes = sum(stored.length for stored in metadata.storage_data.values())
    done_bytes = unchecked = 0

    def read(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, total_bytes)

    with contextlib.ExitStack() as opened:
        files: dict[str, int] = {}
        for file, offset, length, index in sorted(_places(metadata), key=lambda place: place[:3]):
            if is_transformed(metadata.storage_data[index]):
                unchecked += 1
                continue
            if file not in files:
                files[file] = os.open(path / file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, files[file])
            try:
                blob = check_blob(files[file], offset, length, read)
            except BlobError as error:
                raise ManifestError(f"{index.fqn!r} in {file} is damaged: {error}") from error
            if blob.data_bytes < needed_bytes.get(index, 0):
                raise ManifestError(
                    f"{index.fqn!r} in {file} holds {blob.data_bytes} bytes instead of "
                    f"{needed_bytes[index]}"
                )
            unchecked += not blob.is_checked
    return unchecked, len(metadata.storage_data)


def _needed_bytes(metadata: Metadata) -> dict[Any, int]:
    return {
        MetadataIndex(name, chunk.offsets): math.prod(chunk.sizes) * saved.properties.dtype.itemsize
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
        for chunk in saved.chunks
    }
