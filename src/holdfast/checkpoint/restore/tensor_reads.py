"""Read byte ranges of a checkpoint's files into the tensors of a load plan.

PyTorch's planner selects, for any sharding, which box of which saved tensor goes where. This module
turns each box into byte ranges of the file. The ranges are read directly into tensors that are
contiguous in CPU memory.
"""

import ctypes
import io
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from holdfast.checkpoint.format.file_image import template
from holdfast.checkpoint.format.verified_files import ByteRange, VerifiedFiles


def read_items(
    items: Iterable[ReadItem], planner: LoadPlanner, metadata: Metadata, files: VerifiedFiles
) -> None:
    """Read the items of a load plan, and commit each item to the planner.

    Raises:
        ManifestError: a block is damaged.
        OSError: a file cannot be read.
    """
    parts: defaultdict[str, list[ByteRange]] = defaultdict(list)
    then: list[Callable[[], None]] = []
    chunks = _Chunks(metadata)
    for item in items:
        stored = metadata.storage_data[item.storage_index]
        found, finish = (
            _whole_blob(item, planner, stored)
            if item.type == LoadItemType.BYTE_IO or stored.length != chunks.blob_bytes(item)
            else _box(item, planner, stored, chunks, files)
        )
        parts[stored.relative_path] += found
        then.append(finish)
    for name, wanted in parts.items():
        files.read(name, wanted)
    for finish in then:
        finish()


class _Chunks:
    """The types and shapes of the stored chunks that the items of a load plan refer to."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._sizes: dict[str, dict[torch.Size, torch.Size]] = {}

    def of(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        name, offset = item.storage_index.fqn, item.storage_index.offset
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        assert offset is not None, "a tensor is stored from an offset on"
        if name not in self._sizes:
            self._sizes[name] = {chunk.offsets: chunk.sizes for chunk in saved.chunks}
        return saved.properties.dtype, tuple(self._sizes[name][offset])

    def blob_bytes(self, item: ReadItem) -> int:
        """Return the size of the item's blob in Holdfast's layout; -1 for tensors without one."""
        try:
            made = template(*self.of(item))
        except RuntimeError:  # dtype and shape do not describe this tensor
            return -1
        return len(made.head) + made.data_bytes + len(made.tail)


def _whole_blob(
    item: ReadItem, planner: LoadPlanner, stored: _StorageInfo
) -> tuple[list[ByteRange], Callable[[], None]]:
    """Return the byte range of a whole stored blob, and a function that loads it with PyTorch."""
    content = bytearray(stored.length)

    def finish() -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
            return
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    return [ByteRange(stored.offset, memoryview(content))], finish


def _box(
    item: ReadItem,
    planner: LoadPlanner,
    stored: _StorageInfo,
    chunks: _Chunks,
    files: VerifiedFiles,
) -> tuple[list[ByteRange], Callable[[], None]]:
    """Return the byte ranges of a box, and a function that commits the box once they are read.

    The ranges point into the target, or into a temporary tensor that is copied to the target.
    """
    dtype, sizes = chunks.of(item)
    head = template(dtype, sizes).head
    begin, found_head = stored.offset + len(head), bytearray(len(head))
    target = planner.resolve_tensor(item).detach()
    is_plain = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    direct = target.device.type == "cpu" and target.dtype == dtype and is_plain
    wanted = target if direct else torch.empty(tuple(item.lengths), dtype=dtype, device="cpu")
    runs, run = _runs(sizes, item.storage_offsets, item.lengths)
    size_bytes = dtype.itemsize
    memory = _memory(wanted)
    parts = [ByteRange(stored.offset, memoryview(found_head))]
    if memory is not None:
        for number, first in enumerate(runs):
            at = number * run * size_bytes
            parts.append(ByteRange(begin + first * size_bytes, memory[at : at + run * size_bytes]))

    def finish() -> None:
        if found_head != head:  # written by a PyTorch version with another blob layout
            whole, finish_whole = _whole_blob(item, planner, stored)
            files.read(stored.relative_path, whole)
            finish_whole()
            return
        if not direct:
            target.copy_(wanted)
        planner.commit_tensor(item, target)

    return parts, finish


def _runs(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[Iterator[int], int]:
    """Return the offsets of the contiguous runs of a box in a row-major tensor, and the run length.

    Offsets and length count elements.

    Args:
        sizes: the sizes of the tensor.
        offsets: the begin of the box in each dimension.
        lengths: the lengths of the box.
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    # The box covers the dimensions behind `split` whole, so that a run goes through them.
    split = next((dim for dim in range(len(sizes) - 1, -1, -1) if lengths[dim] != sizes[dim]), 0)
    run = math.prod(lengths[split:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer = itertools.product(*(range(length) for length in lengths[:split]))
    starts = (
        base + sum(at * stride for at, stride in zip(place, strides, strict=False))
        for place in outer
    )
    return starts, run


def _memory(tensor: torch.Tensor) -> memoryview | None:
    if not tensor.nbytes:
        return None
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
