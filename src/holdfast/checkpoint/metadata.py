"""DCP's `.metadata` file, read without trusting it.

It is a pickle, and a pickle may call anything. Here it may name only what DCP's own metadata is made of, and
what it says of the files must agree with the files there are.
"""

import io
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint.manifest import ManifestError

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


def read_metadata(folder: Path) -> Metadata:
    """Read the `.metadata` of a checkpoint.

    Raises:
        ManifestError: it is missing, unreadable, or names something that DCP's metadata is not made of;
            nothing of it has been run.
    """
    try:
        content = (folder / METADATA_NAME).read_bytes()
    except OSError as error:
        raise ManifestError(f"{METADATA_NAME} is unreadable ({type(error).__name__}: {error})") from error
    return unpack_metadata(content)


def unpack_metadata(content: bytes) -> Metadata:
    """What the content of a `.metadata` says.

    Raises:
        ManifestError: see `read_metadata`.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except ManifestError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ManifestError(f"{METADATA_NAME} is unreadable ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ManifestError(f"{METADATA_NAME} does not hold DCP's metadata")
    return metadata


def check_against_files(metadata: Metadata, sizes_bytes: Mapping[str, int]) -> None:
    """Check that all that `metadata` promises lies inside the files; `sizes_bytes` by their relative path.

    DCP itself reports success though its writers ran out of space; this does not.

    Raises:
        ManifestError: something is missing; the message names it.
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
                raise ManifestError(f"{name!r} lies in {stored.relative_path}, which is no file of it")
            if stored.offset < 0 or stored.length <= 0 or stored.offset + stored.length > size_bytes:
                raise ManifestError(f"{name!r} lies beyond the end of {stored.relative_path}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        if name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, name)
        if module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Python 3.13 names its classes by their private module.
        if module_name in ("pathlib", "pathlib._local") and name in _PATH_CLASSES:
            return getattr(pathlib, name)
        if (module_name, name) == ("builtins", "getattr"):
            return _enum_member
        return _refuse(f"{module_name}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        _refuse(f"an external object ({pid!r})")


def _enum_member(owner: Any, name: Any) -> Any:
    """Some Python versions pickle an enum's member as `getattr(THE_ENUM, NAME)`; nothing else may pass."""
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    return encoding[name] if owner is encoding else _refuse(f"builtins.getattr of {owner!r}")


def _refuse(name: str) -> NoReturn:
    raise ManifestError(
        f"{METADATA_NAME} names {name}, which no metadata of PyTorch has: it is damaged, or made to run code"
    )
