"""Describe one rank's part of a durable checkpoint that still has a copy in shared memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.format.rank_layout import Layout
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena, State


@dataclass(frozen=True, kw_only=True)
class DurableSnapshot:
    """Describe one rank's part of a durable checkpoint, and the buffer that still holds it.

    Attributes:
        order: the request that describes the save.
        layout: the layout of the rank's files.
        arena: the buffer that holds the snapshot.
        generation: the buffer's count of uses when it received this snapshot. If the count is
            higher now, a later save has overwritten the snapshot.
        blocks: the digests of each file's blocks, by file name, encoded as in a checkpoint's file
            of block digests.
    """

    order: SaveRequest
    layout: Layout
    arena: Arena
    generation: int
    blocks: Mapping[str, bytes]

    def is_there(self) -> bool:
        """Return True if the buffer still holds this snapshot."""
        arena = self.arena
        try:
            return arena.generation == self.generation and arena.state is State.COMMITTED
        except (AttributeError, ValueError):  # another thread has closed the buffer
            return False

    def pack_notes(self) -> bytes:
        """Return the layout and the block digests as bytes, in the order of the layout's files."""
        layout = self.layout.pack()
        digests = b"".join(self.blocks[shard.name] for shard in self.layout.shards)
        return len(layout).to_bytes(_LENGTH_BYTES, "little") + layout + digests


def unpack_notes(notes: bytes) -> tuple[Layout, bytes]:
    """Return the layout and the block digests from the bytes of `DurableSnapshot.pack_notes`."""
    end = _LENGTH_BYTES + int.from_bytes(notes[:_LENGTH_BYTES], "little")
    return Layout.unpack(notes[_LENGTH_BYTES:end]), notes[end:]


def image_bytes(layout: Layout) -> int:
    """Return the size in bytes of a snapshot with this layout."""
    return max((shard.offset + shard.size_bytes for shard in layout.shards), default=0)


_LENGTH_BYTES: Final = 8
