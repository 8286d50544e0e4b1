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
from dataclasses import dataclass
from typing import Final

import torch
from torch.serialization import skip_data

from holdfast.checkpoint.arena import PAGE_BYTES
from holdfast.checkpoint.layout import Shard

ALIGNMENT: Final = 64
"""Bytes to which blobs, and so the tensors' data, are aligned: a cache line, as `torch.save` aligns its records."""
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


@dataclass(frozen=True, kw_only=True)
class Image:
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

    def views(self, memory: memoryview) -> list[torch.Tensor | None]:
        """A tensor over the data of each blob, None for a slot; they live as long as `memory` is mapped."""
        whole = torch.frombuffer(memory, dtype=torch.uint8)

        def view(blob: Blob) -> torch.Tensor | None:
            if blob.need.dtype is None:
                return None
            if not blob.data_bytes:
                return torch.empty(blob.need.shape, dtype=blob.need.dtype)
            data = whole[blob.data_offset : blob.data_offset + blob.data_bytes]
            return data.view(blob.need.dtype).view(blob.need.shape)

        return [view(blob) for blob in self.blobs]


def slot_bytes(length: int) -> int:
    """The slot for a plain value that takes `length` bytes now, with room: a longer number must not move all."""
    return max(_LEAST_SLOT_BYTES, 1 << (length + length // 4).bit_length())


def lay_out(needs: Iterable[Need], *, prefix: str, shard_bytes: int) -> Image:
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
    return Image(blobs=tuple(blobs), shards=tuple(shards), size_bytes=at)


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
        return torch.empty(shape, dtype=dtype)
    with os.fdopen(os.memfd_create("holdfast-hollow"), "r+b") as file:
        file.truncate(size_bytes)
        memory = mmap.mmap(file.fileno(), size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
