"""Convert a checkpoint's model to safetensors, tensor by tensor.

The format (https://huggingface.co/docs/safetensors) has three parts: the length of the header in
eight bytes, little endian; the header, which is JSON with each tensor's dtype, shape and offsets;
and the bytes of the tensors. The safetensors library is not used, since it needs all tensors of a
file in memory at once.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint.convert.hf_model import (
    HF_INDEX_NAME,
    HF_WEIGHTS_NAME,
    expected_tensors,
)
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.checkpoint.format.manifest import ManifestError
from holdfast.checkpoint.format.verified_files import VerifiedFiles
from holdfast.checkpoint.restore import dcp_reader
from holdfast.checkpoint.state.name_map import NameMap, PlannedTensor, settle
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError
from holdfast.core.processes import die_with_parent, end_without_collecting

SHARD_BYTES = 5_000_000_000
"""The largest size of a weight file in bytes; a larger tensor has a separate file."""
_AT_ONCE_BYTES = 256 * 1024 * 1024
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Progress = Callable[[int, int], None]
"""A function `progress(done_bytes, total_bytes)`."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Plan a conversion: which saved tensor becomes which tensor of the model, in written order."""

    plan: list[PlannedTensor]

    def as_text(self) -> str:
        """Return the plan as text, which `from_text` reads in another process."""
        return json.dumps(
            [[each.saved, each.name, each.transposed, each.tied] for each in self.plan]
        )

    @classmethod
    def from_text(cls, text: str) -> "Conversion":
        """Read the plan that `as_text` returned."""
        rows = json.loads(text)
        return cls(
            plan=[
                PlannedTensor(
                    saved=str(saved), name=str(name), transposed=bool(transposed), tied=bool(tied)
                )
                for saved, name, transposed, tied in rows
            ]
        )

    def ranges(self, metadata: Metadata) -> dict[str, list[tuple[int, int]]]:
        """Return the byte ranges to read from each file, as (offset, size in bytes).

        The ranges are sorted, and adjacent ranges are joined.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for each in self.plan:
            for chunk in _tensor(metadata, each.saved).chunks:
                stored = metadata.storage_data[MetadataIndex(each.saved, chunk.offsets)]
                found.setdefault(str(stored.relative_path), []).append(
                    (stored.offset, stored.length)
                )
        return {path: _joined(sorted(ranges)) for path, ranges in sorted(found.items())}

    def size_bytes(self, metadata: Metadata) -> int:
        """Return the total size of the weight files in bytes."""
        tensors = [_Entry(each, metadata) for each in self.plan if not each.tied]
        return sum(
            len(_header(shard)) + sum(each.size_bytes for each in shard)
            for shard in _shards(tensors, SHARD_BYTES)
        )


def settle_conversion(
    metadata: Metadata, hf_config: Path, name_map: NameMap, *, checkpoint: str
) -> Conversion:
    """Find in a checkpoint every tensor of the model that the folder `hf_config` describes.

    Only the metadata is used; no tensor is read.

    Raises:
        BadUse: a tensor is missing, unexpected or of another shape; the message names the tensor.
        CheckpointError: part of a tensor was never written.
    """
    saved = {
        name: each
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    model = expected_tensors(hf_config)
    shapes = {name: tuple(each.size) for name, each in saved.items()}
    plan = settle(shapes, model.shapes, model.ties, name_map, checkpoint=checkpoint)
    for each in plan:
        tensor = saved[each.saved]
        written = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if written != math.prod(tensor.size):
            raise CheckpointError(
                f"{each.saved!r} of {checkpoint} is not whole: {written} of its "
                f"{math.prod(tensor.size)} values were written. Take another checkpoint."
            )
        if tensor.properties.dtype not in _TYPES:
            raise BadUse(
                f"{each.saved!r} is of {tensor.properties.dtype}, which safetensors does not "
                "hold. Convert it."
            )
    return Conversion(plan=plan)


def write_safetensors(
    checkpoint: Path,
    metadata: Metadata,
    conversion: Conversion,
    folder: Path,
    *,
    files: VerifiedFiles | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda _done, _total: None,
) -> list[str]:
    """Write a model's weights into `folder`, durably, and return the names of the files.

    The memory needed is twice the size of the largest tensor, or 512 MiB if that is more. The files
    appear one by one, so the caller should write into a temporary folder and rename it.

    Args:
        checkpoint: the folder of the checkpoint.
        metadata: the checkpoint's metadata.
        conversion: the plan of the conversion.
        folder: an existing folder for the weight files.
        files: the object that reads and verifies the data; None to read without verification.
        shard_bytes: the largest size of a weight file in bytes; only a file with a single larger
            tensor exceeds it.
        progress: called with the number of bytes written so far and the total.

    Raises:
        ManifestError: `files` found damage.
        OSError: a file cannot be read or written.
        CheckpointError: a tensor cannot be read, or tied tensors differ.
    """
    entries = [_Entry(each, metadata) for each in conversion.plan if not each.tied]
    shards = list(_shards(entries, shard_bytes))
    total_bytes = sum(each.size_bytes for each in entries)
    done_bytes = 0
    names = (
        [HF_WEIGHTS_NAME]
        if len(shards) == 1
        else [_shard_name(index, len(shards)) for index in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("xb") as file:
            file.write(_header(shard))
            for group in _groups(shard):
                tensors = dcp_reader.read(
                    checkpoint,
                    metadata,
                    {each.planned.saved: each.empty() for each in group},
                    files,
                )
                for each in group:
                    _write(
                        tensors.pop(each.planned.saved), file, transposed=each.planned.transposed
                    )
                    done_bytes += each.size_bytes
                    progress(done_bytes, total_bytes)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        where = {
            each.planned.name: name
            for name, shard in zip(names, shards, strict=True)
            for each in shard
        }
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
        (folder / HF_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        names = [*names, HF_INDEX_NAME]
    _check_ties(checkpoint, metadata, conversion, files)
    return names


class _Entry:
    """Describe a tensor to write: its dtype, shape and size."""

    def __init__(self, planned: PlannedTensor, metadata: Metadata) -> None:
        saved = _tensor(metadata, planned.saved)
        self.planned = planned
        self.saved_shape = tuple(saved.size)
        self.shape = self.saved_shape[::-1] if planned.transposed else self.saved_shape
        self.dtype: torch.dtype = saved.properties.dtype
        self.size_bytes = math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return a new tensor of the saved shape, with undefined values."""
        return torch.empty(self.saved_shape, dtype=self.dtype, device="cpu")


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    return tensor


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, size_bytes in ranges:
        if joined and joined[-1][0] + joined[-1][1] >= offset:
            first = joined.pop()
            joined.append((first[0], max(first[1], offset + size_bytes - first[0])))
        else:
            joined.append((offset, size_bytes))
    return joined


def _shards(entries: Sequence[_Entry], shard_bytes: int) -> Iterator[list[_Entry]]:
    """Split the tensors into files.

    In each file, tensors with wider dtypes come first, so that all tensors are aligned.
    """
    shard: list[_Entry] = []
    filled_bytes = 0
    for each in entries:
        if shard and filled_bytes + each.size_bytes > shard_bytes:
            yield sorted(shard, key=lambda each: -each.dtype.itemsize)
            shard, filled_bytes = [], 0
        shard.append(each)
        filled_bytes += each.size_bytes
    if shard:
        yield sorted(shard, key=lambda each: -each.dtype.itemsize)


def _groups(shard: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Split the tensors of a file into groups; a group is read at once."""
    group: list[_Entry] = []
    group_bytes = 0
    for each in shard:
        if group and group_bytes + each.size_bytes > _AT_ONCE_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(each)
        group_bytes += each.size_bytes
    yield group


def _header(shard: Sequence[_Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for each in shard:
        offsets = [at, at + each.size_bytes]
        header[each.planned.name] = {
            "dtype": _TYPES[each.dtype],
            "shape": each.shape,
            "data_offsets": offsets,
        }
        at += each.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(tensor: torch.Tensor, file: BinaryIO, *, transposed: bool) -> None:
    if transposed:
        tensor = tensor.t()
    file.write(_bytes_of(tensor).numpy().data)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _check_ties(
    checkpoint: Path, metadata: Metadata, conversion: Conversion, files: VerifiedFiles | None
) -> None:
    written = {each.name: each for each in conversion.plan if not each.tied}
    for each in conversion.plan:
        if each.tied:
            pair = [each, written[each.name]]
            tensors = dcp_reader.read(
                checkpoint,
                metadata,
                {one.saved: _Entry(one, metadata).empty() for one in pair},
                files,
            )
            first, second = (
                tensors[one.saved].t() if one.transposed else tensors[one.saved] for one in pair
            )
            if first.dtype != second.dtype or not torch.equal(_bytes_of(first), _bytes_of(second)):
                raise CheckpointError(
                    f"The model ties {each.saved!r} and {pair[1].saved!r}, but they differ in the "
                    "checkpoint. Set tie_word_embeddings to false in its configuration, or name "
                    "the one that is not used under `drop`."
                )


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


# This module also runs as a process that converts a checkpoint for `holdfast.evaluate`. Its
# arguments are CHECKPOINT and FOLDER, and its standard input has the plan. The checkpoint's files
# need only the byte ranges of `Conversion.ranges`. An error is printed as one line on standard
# error.


def main() -> int:
    """Convert the checkpoint given on the command line; return the exit code."""
    die_with_parent()
    end_without_collecting()
    checkpoint, folder = map(Path, sys.argv[1:])

    try:
        write_safetensors(
            checkpoint,
            read_dcp_metadata(checkpoint),
            Conversion.from_text(sys.stdin.read()),
            folder,
        )
    except (HoldfastError, ManifestError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
