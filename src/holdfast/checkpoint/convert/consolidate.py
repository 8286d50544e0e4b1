"""Write a checkpoint as one file of `torch.save`, for programs that do not read sharded folders.

`torch.load(FILE, weights_only=True)` returns the state that was passed to `Checkpointer.save`.
Objects are replaced by their state dicts, and sharded tensors are put together. The entry
`holdfast` has the `step` and the list `ranks`. That list has a dict for each rank, with `user` (the
rank's `per_rank`) and `rng`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.checkpoint.catalog.catalog import Progress
from holdfast.checkpoint.convert.inspect import OpenedCheckpoint, open_for_reading, reading_verified
from holdfast.checkpoint.format.verified_files import VerifiedFiles
from holdfast.checkpoint.restore import dcp_reader
from holdfast.checkpoint.state.capture import OWN_NAME, rank_structure
from holdfast.checkpoint.state.compatibility import ABSENT, fill
from holdfast.checkpoint.state.skeletons import leaves, shared_skeleton, stored_skeleton
from holdfast.core.atomic import replacing
from holdfast.core.errors import BadUse, CheckpointError, NotFound

_AT_ONCE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class OneFile:
    """Describe a written file: its top-level entries, its number of tensors, and its size."""

    path: Path
    entries: list[str]
    tensors: int
    size_bytes: int


def consolidate_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    entries: Collection[str] = (),
    progress: Progress = lambda _done, _total: None,
) -> OneFile:
    """Write the state of a checkpoint as one file.

    The data is verified when it is read, and the written file is checked. The whole state is held
    in memory. `output` appears only when it is complete.

    Args:
        checkpoint: the folder of one step, written by Holdfast or by DCP. A checkpoint of DCP can
            be verified only as far as it has checksums.
        output: the path of the new file.
        entries: the top-level entries to write; all if empty.
        progress: called with the number of bytes of tensors read so far and the total.

    Raises:
        NotFound: the checkpoint or the folder of `output` does not exist.
        BadUse: `output` exists, or the checkpoint lacks one of `entries`.
        CheckpointError: the checkpoint is damaged, or reading a value would run code.
        OSError: a file cannot be read or written.
    """
    if output.exists() or output.is_symlink():
        raise BadUse(f"{output} exists already. Name a file that does not.")
    if not output.absolute().parent.is_dir():
        raise NotFound(f"There is no folder {output.absolute().parent}. Make it first.")
    opened = open_for_reading(checkpoint)
    with replacing(output) as temporary:
        temporary.touch()  # fail before the read if the folder is not writable
        with reading_verified(opened) as files:
            skeleton = _chosen(_skeleton(opened, files), entries, checkpoint)
            names = list(leaves(skeleton))
            loaded = _read(opened, files, names, progress)
        state = fill(ABSENT, skeleton, loaded)
        if OWN_NAME in state and opened.manifest is not None:
            state[OWN_NAME]["step"] = opened.manifest.step
        _save(state, temporary)
        _check_loads(temporary, output)
        size_bytes = temporary.stat().st_size
    tensors = sum(opened.tensor(name) is not None for name in names)
    return OneFile(path=output, entries=list(state), tensors=tensors, size_bytes=size_bytes)


def _skeleton(opened: OpenedCheckpoint, files: VerifiedFiles | None) -> dict[Any, Any]:
    metadata = opened.metadata

    def read(wanted: Mapping[str, None]) -> Mapping[str, Any]:
        return dcp_reader.read(opened.path, metadata, wanted, files)

    shared = shared_skeleton(metadata, read)
    ranks: list[Any] = []
    while (own := stored_skeleton(rank_structure(len(ranks)), metadata, read)) is not None:
        ranks.append(own)
    return {**shared, OWN_NAME: {"ranks": ranks}} if ranks else shared


def _chosen(skeleton: dict[Any, Any], entries: Collection[str], checkpoint: Path) -> dict[Any, Any]:
    for name in entries:
        if name not in skeleton:
            raise BadUse(
                f"{checkpoint} has no entry {name!r}. It has: {', '.join(map(str, skeleton))}."
            )
    return {name: part for name, part in skeleton.items() if not entries or name in entries}


def _read(
    opened: OpenedCheckpoint,
    files: VerifiedFiles | None,
    names: Collection[str],
    progress: Progress,
) -> dict[str, Any]:
    # Read plain values first: they may be rejected.
    plain = {name: None for name in names if opened.tensor(name) is None}
    loaded = dcp_reader.read(opened.path, opened.metadata, plain, files)
    tensors = {name: saved for name in names if (saved := opened.tensor(name)) is not None}
    total_bytes = sum(_size_bytes(saved) for saved in tensors.values())
    group: dict[str, torch.Tensor | None] = {}
    done_bytes = group_bytes = 0
    for name, saved in tensors.items():
        group[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        group_bytes += _size_bytes(saved)
        if group_bytes >= _AT_ONCE_BYTES:
            loaded.update(dcp_reader.read(opened.path, opened.metadata, group, files))
            done_bytes += group_bytes
            progress(done_bytes, total_bytes)
            group, group_bytes = {}, 0
    loaded.update(dcp_reader.read(opened.path, opened.metadata, group, files))
    progress(total_bytes, total_bytes)
    return loaded


def _size_bytes(saved: TensorStorageMetadata) -> int:
    return saved.size.numel() * saved.properties.dtype.itemsize


def _save(state: dict[Any, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch wraps the file's OSError
        origin: BaseException | None = error
        while origin is not None and not isinstance(origin, OSError):
            origin = origin.__cause__ or origin.__context__
        raise origin or error from None


def _check_loads(written: Path, output: Path) -> None:
    """Check that this version of PyTorch can load the file with `weights_only=True`."""
    try:
        torch.load(written, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{output} was not written: it could not be loaded with weights_only=True ({reason}). "
            "Give --entry for each entry except the one named here."
        ) from error
