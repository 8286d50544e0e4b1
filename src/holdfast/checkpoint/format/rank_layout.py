"""Describe a rank's image to the writing process: the places of its files and tensors.

The layout is sent once, as bytes. This module needs no torch. The only pickle in a layout is DCP's
metadata, which the writing process does not unpickle.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

CHUNK_BYTES: Final = 16 << 20
"""Bytes written and hashed at once: enough for the disk, few enough for several in flight."""
_LENGTH_BYTES: Final = 8


class Shard(NamedTuple):
    """One file of an image: the bytes from `offset`, at a page, to `offset + size_bytes`."""

    name: str
    offset: int
    size_bytes: int


class Piece(NamedTuple):
    """A part of one blob that lies within one chunk; `offset` counts in the image."""

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one rank's image.

    Attributes:
        rank: the rank.
        world_size: the number of ranks.
        torch: the version of PyTorch.
        shards: the files of the image.
        pieces: the attested bytes, in the order of their offsets.
        metadata: the content of DCP's `.metadata`, for all ranks.
        replicated: the flat names of the entries that several ranks have; on rank 0 only.
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
        """Return the size of all files together."""
        return sum(shard.size_bytes for shard in self.shards)

    def pack(self) -> bytes:
        """Serialize the layout."""
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
    """Split blobs where chunks end.

    Args:
        data: the offset in the image and the length of each blob, in order.
        shards: the files; chunks are counted from the start of each file.

    Returns:
        Each piece, and the index of its blob.
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
