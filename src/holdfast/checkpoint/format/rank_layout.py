"""Describe to the writing process where a rank's files and tensors are in a snapshot buffer.

The content of the buffer is called the image. Its layout is sent once, as bytes. The only pickle in
a layout is DCP's metadata, which the writing process does not unpickle. This module needs no torch.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

CHUNK_BYTES: Final = 16 << 20
"""Bytes written and hashed at once: enough for a fast disk, few enough to have several at once."""
_LENGTH_BYTES: Final = 8


class Shard(NamedTuple):
    """Locate one file in an image: `size_bytes` from `offset` on, which is a page boundary."""

    name: str
    offset: int
    size_bytes: int


class Piece(NamedTuple):
    """Locate a byte range with its own digest; `offset` counts from the start of the image.

    A piece belongs to one saved item and lies within one chunk.
    """

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describe one rank's image, and the checkpoint that it is a part of.

    Attributes:
        rank: the number of the rank.
        world_size: the number of ranks.
        torch: the version of PyTorch.
        shards: the files of the image.
        pieces: the byte ranges with their own digests, in the order of their offsets.
        metadata: the content of DCP's `.metadata`, for all ranks.
        replicated: the flat names of the entries that several ranks have; empty on ranks other than
            0.
    """

    rank: int
    world_size: int
    torch: str
    shards: tuple[Shard, ...]
    pieces: tuple[Piece, ...]
    metadata: bytes
    replicated: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(shard.size_bytes for shard in self.shards)

    def pack(self) -> bytes:
        """Serialize the layout as bytes."""
        numbers = array("q", (number for piece in self.pieces for number in piece))
        if sys.byteorder == "big":
            numbers.byteswap()
        head = json.dumps(
            {
                "rank": self.rank,
                "world_size": self.world_size,
                "torch": self.torch,
                "shards": self.shards,
                "pieces": len(self.pieces),
                "replicated": self.replicated,
            }
        ).encode()
        return (
            len(head).to_bytes(_LENGTH_BYTES, "little") + head + numbers.tobytes() + self.metadata
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Parse the bytes that `pack` returned."""
        begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        head = json.loads(data[_LENGTH_BYTES:begin])
        end = begin + 2 * 8 * head["pieces"]
        numbers = array("q", data[begin:end])
        if sys.byteorder == "big":
            numbers.byteswap()
        return cls(
            rank=head["rank"],
            world_size=head["world_size"],
            torch=head["torch"],
            shards=tuple(Shard(*shard) for shard in head["shards"]),
            pieces=tuple(map(Piece, numbers[::2], numbers[1::2])),
            metadata=data[end:],
            replicated=tuple(head.get("replicated", ())),  # absent in older versions of Holdfast
        )


def pieces_of(
    data: Iterable[tuple[int, int]], shards: Sequence[Shard]
) -> tuple[tuple[Piece, int], ...]:
    """Split saved items into the pieces that are digested separately.

    An item is split wherever a chunk of `CHUNK_BYTES` ends.

    Args:
        data: the offset in the image and the length of each item, in order.
        shards: the files; chunks are counted from the start of each file.

    Returns:
        Each piece, and the index of its item in `data`.
    """
    found: list[tuple[Piece, int]] = []
    remaining = iter(shards)
    shard = next(remaining, None)
    for index, (offset, length) in enumerate(data):
        while shard is not None and offset >= shard.offset + shard.size_bytes:
            shard = next(remaining, None)
        begin = shard.offset if shard is not None else 0
        at, end = offset, offset + length
        while at < end:
            until = min(end, begin + ((at - begin) // CHUNK_BYTES + 1) * CHUNK_BYTES)
            found.append((Piece(at, until - at), index))
            at = until
    return tuple(found)


PAGE_BYTES: Final = 4096
