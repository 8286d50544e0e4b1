"""Make sealed images to save: by hand, without torch, and from a state."""

from dataclasses import dataclass, replace

from holdfast.checkpoint.catalog.retention import Retention
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Layout, Piece, Shard
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena, State
from holdfast.checkpoint.writer import persist as persisting
from holdfast.checkpoint.writer.direct_io import piece_digests
from holdfast.core.rate_limit import RateLimit

TEN_FILES = [4096] * 9 + [4096 * 5]
"""The sizes of ten files, of which the last one is larger."""


class Enough(Exception):
    """The awaited event does not come."""


@dataclass(frozen=True)
class Part:
    """The part of one rank, and the memory that holds the part."""

    layout: Layout
    memory: memoryview
    live: bytes

    def persist(self, order, *, live=None, wait=None, progress=lambda _: None):
        persisting.persist(
            persisting.RankWrite(
                order=order,
                layout=self.layout,
                image=self.memory,
                live=self.live if live is None else live,
                await_copy=lambda _count: None,
                wait=wait or no_waiting,
                pace=RateLimit(None),
                progress=progress,
            )
        )
        if self.layout.rank == 0:
            persisting.delete_superfluous(order)


def no_waiting():
    raise Enough


def hand_made(*, rank=0, world_size=1, sizes=(100, 5000), metadata=b"metadata"):
    """Return a layout of files of `sizes` bytes, one piece a file."""
    shards, at = [], 0
    for number, size_bytes in enumerate(sizes):
        shards.append(Shard(f"__{rank}_{number}.distcp", at, size_bytes))
        at += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return Layout(
        rank=rank,
        world_size=world_size,
        torch="2.13.0",
        shards=tuple(shards),
        pieces=tuple(Piece(shard.offset, shard.size_bytes) for shard in shards),
        metadata=metadata,
    )


def sealed(layout, fill):
    """Return an arena in which every file of `layout` is full of the byte `fill`, also the step."""
    last = layout.shards[-1]
    arena = Arena.make(last.offset + last.size_bytes, 8 * len(layout.pieces))
    seal(arena, layout, fill)
    return arena


def seal(arena, layout, fill):
    generation = half_copied(arena, layout, fill, files=len(layout.shards))
    arena.move(State.SEALED, generation)
    return generation


def half_copied(arena, layout, fill, files):
    """Begin a use of which only the first `files` files are copied; the digests cover all files."""
    for shard in layout.shards:
        arena.image[shard.offset : shard.offset + shard.size_bytes] = (
            bytes([fill]) * shard.size_bytes
        )
    generation = arena.begin(fill)
    arena.notes[: 8 * len(layout.pieces)] = piece_digests(arena.image, layout.pieces)
    for shard in layout.shards[files:]:
        arena.image[shard.offset : shard.offset + shard.size_bytes] = bytes(shard.size_bytes)
    if files:
        arena.advance(
            layout.shards[files - 1].offset + layout.shards[files - 1].size_bytes, generation
        )
    return generation


def part_of(layout, arena):
    return Part(layout, arena.image, bytes(arena.notes[: 8 * len(layout.pieces)]))


def order_of(folder, step, *, save=None, keep=None, damaged=()):
    return SaveRequest(
        folder=folder,
        step=step,
        save=save or f"save-{step}",
        created_at_s=1.0,
        keep=Retention(last=keep),
        damaged=tuple(damaged),
    )


def again(order):
    """Return the request of another save of the same step."""
    return replace(order, save=order.save + "-again")


def is_whole(folder, step, fill, layouts):
    """Return True if the checkpoint of `step` verifies and is full of `fill`."""
    from holdfast.checkpoint import verify
    from holdfast.checkpoint.format.paths import step_path

    path = step_path(folder, step)
    contents = [
        (path / shard.name).read_bytes() == bytes([fill]) * shard.size_bytes
        for layout in layouts
        for shard in layout.shards
    ]
    return verify(path).state == "verified" and all(contents)
