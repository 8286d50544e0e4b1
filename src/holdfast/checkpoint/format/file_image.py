"""A rank's part of a checkpoint as bytes: the files that PyTorch Distributed Checkpoint would write, laid out before.

The staged image is the file image. Each tensor is a blob as `torch.save` writes it: a head, the tensor's own bytes, a
tail. Head and tail depend on type and shape alone, so they are written into an arena once; a snapshot copies the
tensors' bytes between them, and what is then written to disk, sent to a peer or mapped again is the arena as it is.
A plain value has a slot with room to grow, so that the layout, and with it DCP's metadata, stays as it is.
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
"""Bytes to which blobs, and so the tensors' data, are aligned: a cache line, as `torch.save` aligns its records."""
LARGE_BYTES: Final = 128 << 10
"""From here on a tensor's data is copied and digested by itself, below together with what is around it."""
LEAST_PIECE_BYTES: Final = 256
"""No piece of a tensor that is digested is shorter: XXH3 has one way for more than 240 bytes, and others for fewer."""
_LEAST_SLOT_BYTES: Final = 512
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""Of a ZIP member: 26 bytes, then the lengths of its name and of its extra field (APPNOTE 4.3.7)."""
_RECORD: Final = "/data/0"
"""The member that holds a tensor's bytes."""


@dataclass(frozen=True, slots=True)
class Template:
    """What `torch.save` writes around the bytes of a contiguous tensor of one type and shape."""

    head: bytes
    data_bytes: int
    tail: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What is to have a place in an image: a tensor of `dtype` and `shape`, or, without a type, a slot of bytes."""

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    slot_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """One tensor or slot; offsets in bytes: `offset` and `data_offset` in the image, `file_offset` in its file."""

    need: Need
    file: str
    file_offset: int
    offset: int
    length: int
    data_offset: int
    data_bytes: int

    @property
    def is_large(self) -> bool:
        """Whether it is a tensor whose data is digested by itself."""
        return self.need.dtype is not None and self.data_bytes >= LARGE_BYTES

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Offset in the image and length of what is digested by itself: a large tensor's head, data and tail."""
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
    """Where everything lies: files one after another, each beginning at a page."""

    blobs: tuple[Blob, ...]
    shards: tuple[Shard, ...]
    size_bytes: int

    def write_frames(self, memory: memoryview) -> None:
        """Write all heads and tails into `memory`, of at least `size_bytes`; the rest of it is zero already."""
        for blob in self.blobs:
            if blob.need.dtype is not None:
                made = template(blob.need.dtype, blob.need.shape)
                memory[blob.offset : blob.data_offset] = made.head
                memory[blob.data_offset + blob.data_bytes : blob.offset + blob.length] = made.tail

    def views(self, memory: torch.Tensor) -> list[torch.Tensor | None]:
        """A tensor over the data of each blob, None for a slot.

        Args:
            memory: bytes (uint8) of any device, at least `size_bytes`; the views keep them alive.
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
        """The blobs from `first` to `end`, at least one, as an image of their own, without files."""
        begin = self.blobs[first].offset
        blobs = tuple(
            replace(blob, offset=blob.offset - begin, data_offset=blob.data_offset - begin)
            for blob in self.blobs[first:end]
        )
        return type(self)(blobs=blobs, shards=(), size_bytes=blobs[-1].offset + blobs[-1].length)


def slot_bytes(length: int) -> int:
    """The slot for a plain value that takes `length` bytes now, with room: a longer number must not move all."""
    return max(_LEAST_SLOT_BYTES, 1 << (length + length // 4).bit_length())


def lay_out(needs: Iterable[Need], *, prefix: str, shard_bytes: int) -> FileImage:
    """The image of `needs`, in their order.

    Args:
        needs: what it holds.
        prefix: of the files' names; a number and `.distcp` follow.
        shard_bytes: a file ends where the next blob would make it longer. One blob is never cut.
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
    """The place in a file, from `at` on, where a chunk ends in no small blob, and near no end of a large one."""
    if data < LARGE_BYTES:
        left = -at % CHUNK_BYTES
        return at + left if left < length else at
    while not all(
        (edge % CHUNK_BYTES or CHUNK_BYTES) >= LEAST_PIECE_BYTES
        for edge in (-(at + head), at + head + data)
    ):
        at += ALIGNMENT
    return at


@functools.lru_cache(maxsize=65_536)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """What `torch.save` writes around a tensor's bytes; no memory of the tensor's size is taken."""
    with os.fdopen(os.memfd_create("holdfast-template"), "w+b") as file:  # its data is a hole
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
    """A tensor whose memory is a hole in a file: PyTorch's fake ones take a second to import."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with os.fdopen(os.memfd_create("holdfast-hollow"), "r+b") as file:
        file.truncate(size_bytes)
        memory = mmap.mmap(file.fileno(), size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
