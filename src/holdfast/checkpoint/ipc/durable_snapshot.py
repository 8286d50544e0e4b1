"""Describe a rank's part of a durable checkpoint that is still in shared memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.format.rank_layout import Layout
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena, State


@dataclass(frozen=True, kw_only=True)
class DurableSnapshot:
    """A rank's part of a durable checkpoint, in memory.

    Attributes:
        order: the request of the save.
        layout: the layout of the rank's files.
        arena: the buffer that holds the snapshot.
        generation: the use of the buffer that the snapshot belongs to.
        blocks: file name to the digests of the file's blocks, as in the sidecar.
    """

    order: SaveRequest
    layout: Layout
    arena: Arena
    generation: int
    blocks: Mapping[str, bytes]

    def is_there(self) -> bool:
        """Return whether the buffer still holds this snapshot."""
        arena = self.arena
        try:
            return arena.generation == self.generation and arena.state is State.COMMITTED
        except (AttributeError, ValueError):  # another thread has closed the buffer
            return False

    def pack_notes(self) -> bytes:
        """Pack the layout, followed by the digests in the order of the layout's files."""
        layout = self.layout.pack()
        digests = b"".join(self.blocks[shard.name] for shard in self.layout.shards)
        return len(layout).to_bytes(_LENGTH_BYTES, "little") + layout + digests


def unpack_notes(notes: bytes) -> tuple[Layout, bytes]:
    """Unpack the bytes of `DurableSnapshot.pack_notes`: the layout and the digests."""
    end = _LENGTH_BYTES + int.from_bytes(notes[:_LENGTH_BYTES], "little")
    return Layout.unpack(notes[_LENGTH_BYTES:end]), notes[end:]


def image_bytes(layout: Layout) -> int:
    """Return the length in bytes of a snapshot with this layout."""
    return max((shard.offset + shard.size_bytes for shard in layout.shards), default=0)


_LENGTH_BYTES: Final = 8
