"""Read the `.metadata` file of PyTorch's DCP without running code from it.

The file is a pickle, and a pickle may call any function. This reader accepts only a pickle that
names the classes of DCP's own metadata. All parts that the metadata lists must lie inside the
checkpoint's files.
"""

import contextlib
import copyreg
import dataclasses
import functools
import importlib
import io
import pathlib
import pickle
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.checkpoint.format.manifest import ManifestError

METADATA_NAME = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "bytearray", "complex"},
}
_PATH_CLASSES = {"Path", "PosixPath", "PurePath", "PurePosixPath"}


def read_dcp_metadata(folder: Path) -> Metadata:
    """Read the file `.metadata` of a checkpoint.

    Raises:
        ManifestError: the file is missing, unreadable, or names a class or function outside DCP's
            metadata; no such function has run.
    """
    try:
        content = (folder / METADATA_NAME).read_bytes()
    except OSError as error:
        raise ManifestError(
            f"{METADATA_NAME} is unreadable ({type(error).__name__}: {error})"
        ) from error
    return unpack_metadata(content)


def unpack_metadata(content: bytes) -> Metadata:
    """Parse the content of a `.metadata` file.

    Raises:
        ManifestError: see `read_dcp_metadata`.
    """
    try:
        with _unchanged():
            metadata = _Unpickler(io.BytesIO(content)).load()
    except ManifestError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ManifestError(
            f"{METADATA_NAME} is unreadable ({type(error).__name__}: {error})"
        ) from error
    if not _is_of_the_right_types(metadata):
        raise ManifestError(f"{METADATA_NAME} does not hold DCP's metadata")
    checked: Metadata = metadata
    return checked


def _is_of_the_right_types(metadata: Any) -> bool:
    """Return True if `metadata` and all its parts have the types that DCP's metadata has.

    A forged or damaged file may hold any object instead.
    """
    try:
        return (
            isinstance(metadata, Metadata)
            and all(
                map(
                    _is_saved,
                    metadata.state_dict_metadata.keys(),
                    metadata.state_dict_metadata.values(),
                )
            )
            and all(map(_is_stored, metadata.storage_data.keys(), metadata.storage_data.values()))
            and (metadata.planner_data is None or isinstance(metadata.planner_data, dict))
        )
    except AttributeError:
        return False


def _is_saved(name: Any, saved: Any) -> bool:
    if not isinstance(name, str):
        return False
    return isinstance(saved, BytesStorageMetadata) or (
        isinstance(saved, TensorStorageMetadata)
        and isinstance(saved.properties.dtype, torch.dtype)
        and _are_whole(saved.size)
        and isinstance(saved.chunks, list)
        and all(_are_whole(chunk.offsets) and _are_whole(chunk.sizes) for chunk in saved.chunks)
    )


def _is_stored(index: Any, stored: Any) -> bool:
    return (
        isinstance(index, MetadataIndex)
        and isinstance(index.fqn, str)
        and isinstance(stored.relative_path, str | pathlib.PurePath)
        and type(stored.offset) is int
        and type(stored.length) is int
    )


def _are_whole(numbers: Any) -> bool:
    return isinstance(numbers, tuple | list) and all(type(number) is int for number in numbers)


def check_metadata_against_files(metadata: Metadata, sizes_bytes: Mapping[str, int]) -> None:
    """Check that all parts that `metadata` lists lie inside the checkpoint's files.

    This check is needed because DCP reports success even if its writers ran out of space.
    `sizes_bytes` has the size of each file by its relative path.

    Raises:
        ManifestError: a part is missing or lies outside; the message names the part.
    """
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            parts = [MetadataIndex(name, chunk.offsets) for chunk in saved.chunks]
        else:
            parts = [MetadataIndex(name)]
        for part in parts:
            stored = metadata.storage_data.get(part)
            if stored is None:
                raise ManifestError(f"{name!r} was never written")
            size_bytes = sizes_bytes.get(str(stored.relative_path))
            if size_bytes is None:
                raise ManifestError(
                    f"{name!r} lies in {stored.relative_path}, which is not a file of the checkpoint"
                )
            if (
                stored.offset < 0
                or stored.length <= 0
                or stored.offset + stored.length > size_bytes
            ):
                raise ManifestError(f"{name!r} lies beyond the end of {stored.relative_path}")


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Run the block, and raise ManifestError if it changed a class or function of `_CLASSES`.

    A pickle can change the classes and functions that it names. Changes are undone.
    """
    named = [
        getattr(importlib.import_module(module), name)
        for module in _CLASSES
        for name in _CLASSES[module]
    ]
    named.append(_Properties)
    named += [getattr(pathlib, name) for name in _PATH_CLASSES]
    classes = {each for each in named if isinstance(each, type)}
    for each in classes:
        copyreg._slotnames(each)  # type: ignore[attr-defined] # which pickling would add to it
    owners = [*classes, *dcp_metadata._MEM_FORMAT_ENCODING]
    before = [dict(vars(each)) for each in owners]
    try:
        yield
    finally:
        changed = [each for each, had in zip(owners, before, strict=True) if _put_back(each, had)]
    if changed:
        _refuse(f"attributes of {changed[0]}")


def _put_back(owner: object, before: Mapping[str, Any]) -> bool:
    """Restore the attributes of a class or an enum member; return True if they had changed."""
    now = dict(vars(owner))
    added = now.keys() - before.keys()
    replaced = {name for name, value in before.items() if now.get(name) is not value}
    for name in added:
        delattr(owner, name)
    for name in replaced:
        setattr(owner, name, before[name])
    return bool(added or replaced)


class _Properties(TensorProperties):
    """Accept tensor properties with additional fields of a newer PyTorch, as `strides` in 2.15."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(dataclasses.fields(TensorProperties))])  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        if (module_name, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _Properties
        if name in _CLASSES.get(module_name, ()):
            found = super().find_class(module_name, name)
            # A function's attributes can be set, too, so the pickle gets a fresh wrapper.
            return functools.partial(found) if isinstance(found, types.FunctionType) else found
        if module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Python 3.13 names its classes by their private module.
        if module_name in ("pathlib", "pathlib._local") and name in _PATH_CLASSES:
            return getattr(pathlib, name)
        if (module_name, name) == ("builtins", "getattr"):
            return functools.partial(_enum_member)
        return _refuse(f"{module_name}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        _refuse(f"an external object ({pid!r})")


def _enum_member(owner: Any, name: Any) -> Any:
    """Return an enum member for a pickled call of `getattr(THE_ENUM, NAME)`.

    Some Python versions pickle enum members in this way. Any other call of `getattr` raises
    ManifestError.
    """
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    return encoding[name] if owner is encoding else _refuse(f"builtins.getattr of {owner!r}")


def _refuse(name: str) -> NoReturn:
    raise ManifestError(
        f"{METADATA_NAME} names {name}, which no metadata of PyTorch has: it is damaged, or made to run code"
    )
