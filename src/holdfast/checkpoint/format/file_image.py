"""Lay out a rank's part of a checkpoint as bytes, like the files that PyTorch's DCP writes.

The image is the content of these files, one after the other, in a snapshot buffer. The place of one
saved tensor or value in the image is called a blob. A tensor's blob has the bytes that `torch.save`
writes: a head, the tensor's data, and a tail. Head and tail depend only on type and shape, so they
are written into the buffer once, and each snapshot copies only the data between them. The buffer is
then written to disk, sent to a peer or mapped again, without any change. A plain value has a slot,
a blob that is larger than the value. So if the value grows, the layout and DCP's metadata can stay
the same.
"""

import functools
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch.serialization import skip_data

from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES, PAGE_BYTES, Shard

ALIGNMENT: Final = 64
"""The alignment of blobs and of tensor data, in bytes: a cache line, as in `torch.save`."""
LARGE_BYTES: Final = 128 << 10
"""The size from which on a tensor's data is copied and digested apart from its head and tail."""
MIN_PIECE_BYTES: Final = 256
"""The minimum length of a digested piece: below 241 bytes, XXH3 uses other algorithms."""
_MIN_SLOT_BYTES: Final = 512
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""A ZIP member's header: 26 bytes, then the lengths of name and extra field (APPNOTE 4.3.7)."""
_RECORD: Final = "/data/0"
"""The end of the name of the ZIP member that holds a tensor's bytes."""


@dataclass(frozen=True, slots=True)
class Template:
    """Hold the bytes that `torch.save` writes around a contiguous tensor of one type and shape."""

    head: bytes
    data_bytes: int
    tail: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Request a place in an image for one tensor or plain value.

    A tensor is described by `dtype` and `shape`. If `dtype` is None, the place is a slot of
    `slot_bytes` for a plain value.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    slot_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """Describe the place of one tensor or plain value; offsets and sizes are in bytes.

    Attributes:
        need: the requested type and shape, or slot size.
        file: the name of the file.
        file_offset: the offset of the blob in the file.
        offset: the offset of the blob in the image.
        length: the size of the blob, with head and tail.
        data_offset: the offset of the tensor's data in the image.
        data_bytes: the size of the tensor's data.
    """

    need: Need
    file: str
    file_offset: int
    offset: int
    length: int
    data_offset: int
    data_bytes: int

    @property
    def is_large(self) -> bool:
        """Return True for a tensor so large that its data is digested apart from head and tail."""
        return self.need.dtype is not None and self.data_bytes >= LARGE_BYTES

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Return the offset in the image and the length of each part with its own digest.

        A large tensor has three parts: head, data and tail. Any other blob is one part.
        """
        if not self.is_large:
            return ((self.offset, self.length),)
        end = self.data_offset + self.data_bytes
        return (
            (self.offset, self.data_offset - self.offset),
            (self.data_offset, self.data_bytes),
            (end, self.offset + self.length - end),
        )


@dataclass(frozen=True, kw_only=True)
class FileImage:
    """Describe the places of all blobs and files in an image.

    The files follow one another, and each starts at a page boundary.
    """

    blobs: tuple[Blob, ...]
    shards: tuple[Shard, ...]
    size_bytes: int

    def write_frames(self, memory: memoryview) -> None:
        """Write the heads and tails of all tensors into `memory`, which contains only zeros."""
        for blob in self.blobs:
            if blob.need.dtype is not None:
                made = template(blob.need.dtype, blob.need.shape)
                memory[blob.offset : blob.data_offset] = made.head
                memory[blob.data_offset + blob.data_bytes : blob.offset + blob.length] = made.tail

    def views(self, memory: torch.Tensor) -> list[torch.Tensor | None]:
        """Return for each blob a tensor whose memory is the blob's data; None for a slot.

        Args:
            memory: a uint8 tensor on any device, of at least `size_bytes`; the returned tensors
                keep it alive.
        """

        def view(blob: Blob) -> torch.Tensor | None:
            if blob.need.dtype is None:
                return None
            if not blob.data_bytes:
                return torch.empty(blob.need.shape, dtype=blob.need.dtype, device=memory.device)
            data = memory[blob.data_offset : blob.data_offset + blob.data_bytes]
            return data.view(blob.need.dtype).view(blob.need.shape)

        return [view(blob) for blob in self.blobs]

    def cut(self, first: int, end: int) -> Self:
        """Return the blobs `first` to `end` (exclusive) as a separate image.

        The returned image has no files. There must be at least one blob.
        """
        begin = self.blobs[first].offset
        blobs = tuple(
            replace(blob, offset=blob.offset - begin, data_offset=blob.data_offset - begin)
            for blob in self.blobs[first:end]
        )
        return type(self)(blobs=blobs, shards=(), size_bytes=blobs[-1].offset + blobs[-1].length)


def slot_bytes(length: int) -> int:
    """Return the size of a slot for a value of `length` bytes, with room for the value to grow."""
    return max(_MIN_SLOT_BYTES, 1 << (length + length // 4).bit_length())


def lay_out(needs: Iterable[Need], *, prefix: str, shard_bytes: int) -> FileImage:
    """Assign each of `needs` a place in an image, in order.

    Args:
        needs: the tensors and slots.
        prefix: the start of the file names, before a number and `.distcp`.
        shard_bytes: the largest size of a file in bytes. Blobs are not split, so a file with one
            larger blob exceeds this size.
    """
    blobs: list[Blob] = []
    shards: list[Shard] = []
    at = begin = 0

    def end_shard() -> None:
        nonlocal at, begin
        if at > begin:
            shards.append(Shard(f"{prefix}{len(shards)}.distcp", begin, at - begin))
            at = begin = -(-at // PAGE_BYTES) * PAGE_BYTES

    for need in needs:
        if need.dtype is None:
            head, data, length = 0, need.slot_bytes, need.slot_bytes
        else:
            made = template(need.dtype, need.shape)
            head, data = len(made.head), made.data_bytes
            length = head + data + len(made.tail)
        if at - begin + length > shard_bytes:
            end_shard()
        at = begin + _uncut(at - begin, head, data, length)
        blobs.append(
            Blob(
                need=need,
                file=f"{prefix}{len(shards)}.distcp",
                file_offset=at - begin,
                offset=at,
                length=length,
                data_offset=at + head,
                data_bytes=data,
            )
        )
        at += -(-length // ALIGNMENT) * ALIGNMENT
    end_shard()
    return FileImage(blobs=tuple(blobs), shards=tuple(shards), size_bytes=at)


def _uncut(at: int, head: int, data: int, length: int) -> int:
    """Return the lowest allowed offset, not below `at`, for a blob in its file.

    An offset is not allowed if a chunk of `CHUNK_BYTES` would end inside a small blob, or too near
    to an end of a large tensor's data.
    """
    if data < LARGE_BYTES:
        left = -at % CHUNK_BYTES
        return at + left if left < length else at
    while not all(
        (edge % CHUNK_BYTES or CHUNK_BYTES) >= MIN_PIECE_BYTES
        for edge in (-(at + head), at + head + data)
    ):
        at += ALIGNMENT
    return at


@functools.lru_cache(maxsize=65_536)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """Return the bytes that `torch.save` writes around a tensor's data.

    The function does not allocate memory of the tensor's size.
    """
    with os.fdopen(os.memfd_create("holdfast-template"), "w+b") as file:  # the data is a hole
        with skip_data():
            torch.save(_hollow(dtype, shape), file)
        file.flush()
        with zipfile.ZipFile(file) as archive:
            (record,) = (one for one in archive.infolist() if one.filename.endswith(_RECORD))
        file.seek(record.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        begin = record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        file.seek(0)
        head = file.read(begin)
        file.seek(begin + record.file_size)
        return Template(head, record.file_size, file.read())


def _hollow(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that takes no memory, because it maps a hole in a file.

    PyTorch's fake tensors are not used, since importing them takes a second.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with os.fdopen(os.memfd_create("holdfast-hollow"), "r+b") as file:
        file.truncate(size_bytes)
        memory = mmap.mmap(file.fileno(), size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
