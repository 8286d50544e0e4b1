"""Read byte ranges of a checkpoint's files into the tensors of a load plan.

For any sharding, PyTorch's planner selects which part of which saved tensor goes into which live
tensor. Such a part is a box: a range of indices in each dimension. This module finds the byte
ranges of each box in the file. If the live tensor is contiguous in CPU memory, the bytes are read
directly into it.
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
    """Read the items of DCP's load plan, and commit each item to the planner.

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
    """Look up the types and shapes of the stored chunks to which items of a load plan refer."""

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
        """Return how many bytes Holdfast writes for the item's chunk; -1 if it stores none."""
        try:
            made = template(*self.of(item))
        except RuntimeError:  # dtype and shape do not describe this tensor
            return -1
        return len(made.head) + made.data_bytes + len(made.tail)


def _whole_blob(
    item: ReadItem, planner: LoadPlanner, stored: _StorageInfo
) -> tuple[list[ByteRange], Callable[[], None]]:
    """Prepare to read the whole stored item and load it with PyTorch.

    Returns:
        The byte range to read, and the function to call after the read.
    """
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
    """Prepare to read only the bytes of a box, the requested part of a stored tensor.

    The bytes are read into the target tensor, or into a temporary tensor that is then copied to the
    target.

    Returns:
        The byte ranges to read, and the function to call after the read.
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
    """Split a box, a part of a row-major tensor, into runs that are contiguous in memory.

    All numbers count elements.

    Args:
        sizes: the size of the tensor in each dimension.
        offsets: the start of the box in each dimension.
        lengths: the length of the box in each dimension.

    Returns:
        The offset of each run in the tensor, and the length of every run.
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    # In the dimensions after `split`, the box is as long as the tensor, so a run extends over all
    # of them.
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
