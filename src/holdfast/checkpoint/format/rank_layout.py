"""What the writing process knows of a rank's image: where its files lie in it, and where the tensors' bytes.

It travels once for each layout, as bytes; nothing here needs torch, and nothing in it is a pickle but DCP's metadata,
which is passed on unread.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

CHUNK_BYTES: Final = 16 << 20
"""What is written and hashed at once: large enough for the disk, small enough for several to be on their way."""
_LENGTH_BYTES: Final = 8


class Shard(NamedTuple):
    """One file of an image: bytes `offset` (at a page) to `offset + size_bytes` of it."""

    name: str
    offset: int
    size_bytes: int


class Piece(NamedTuple):
    """A part of one blob that no chunk's end cuts; `offset` in the image."""

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`pieces`: the bytes that are attested, in the order of their offsets. `metadata`: DCP's, of all ranks.

    `replicated`: the flat names of what several ranks have; on rank 0 alone.
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
        """Of the files together."""
        return sum(shard.size_bytes for shard in self.shards)

    def pack(self) -> bytes:
        """As bytes."""
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
        """What `pack` packed."""
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
            replicated=tuple(head.get("replicated", ())),  # older versions of Holdfast keep none
        )


def pieces_of(
    data: Iterable[tuple[int, int]], shards: Sequence[Shard]
) -> tuple[tuple[Piece, int], ...]:
    """Blobs, cut where chunks end.

    Args:
        data: offset in the image and length of each, in order.
        shards: the files; chunks are counted from each file's begin.

    Returns:
        Each piece and the index of what it is a part of.
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
