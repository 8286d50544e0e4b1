"""Ranks that come back on a new node get their images from the nodes that held them.

All say what their nodes have; those that lack their image get it from the trainer of a rank whose node has it, over a
group of their own, into memory. What was sent is trusted no more than what lay there.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.ipc.memory_reservation import reserved
from holdfast.checkpoint.memory.client import MemorySnapshot, PreviousRanks
from holdfast.checkpoint.memory.server import SnapshotInfo
from holdfast.core.errors import CheckpointError

_TIMEOUT: Final = timedelta(minutes=10)
"""A rank may wait for those that are served before it; that the other side died is known at once."""
_CHUNK_BYTES: Final = 64 << 20


class Move(NamedTuple):
    """The image of rank `target` goes from rank `source` to it."""

    source: int
    target: int
    info: SnapshotInfo


def newest_whole(told: Sequence[Sequence[SnapshotInfo]], world_size: int) -> tuple[int, str] | None:
    """Step and name of the newest save of which the image of each rank is in some node's memory.

    Args:
        told: what the node of each rank has.
        world_size: how many ranks there are; of other numbers nothing counts.
    """
    ranks: dict[tuple[int, str], set[int]] = {}
    for image in (image for each in told for image in each if image.world_size == world_size):
        ranks.setdefault((image.step, image.save), set()).add(image.rank)
    return max((save for save, having in ranks.items() if len(having) == world_size), default=None)


def moves(told: Sequence[Sequence[SnapshotInfo]], save: tuple[int, str]) -> list[Move]:
    """Who sends whom what, so that each rank has its image; those that can send take turns.

    Args:
        told: what the node of each rank has.
        save: step and name of one that `newest_whole` found.
    """
    having: dict[int, list[tuple[int, SnapshotInfo]]] = {}
    for rank, each in enumerate(told):
        for image in each:
            if (image.step, image.save) == save:
                having.setdefault(image.rank, []).append((rank, image))
    sending = [0] * len(told)
    found = []
    for target in range(len(told)):
        sources = dict(having[target])
        if target not in sources:
            source = min(sources, key=lambda rank: (sending[rank], rank))
            sending[source] += 1
            found.append(Move(source, target, sources[source]))
    return found


def bring(ranks: Ranks, memory: PreviousRanks, planned: Sequence[Move]) -> str:
    """Make the moves; why that is not possible, on all ranks, or nothing. Collective."""
    if not planned:
        return ""
    own = [move for move in planned if ranks.rank in (move.source, move.target)]
    parts: list[_Part] = []
    group: dist.ProcessGroup | None = None

    def prepare() -> (
        None
    ):  # all that can fail on one rank alone: later another one would wait for it
        for move in own:
            parts.append(_lying(memory, move) if move.source == ranks.rank else _room(move))

    def make_group() -> None:
        nonlocal group
        involved = sorted({rank for move in planned for rank in (move.source, move.target)})
        group = ranks.new_group(involved, timeout=_TIMEOUT)

    def send_and_receive() -> None:
        for part in parts:
            for chunk in _chunks(part):
                if part.move.source == ranks.rank:
                    dist.send(chunk, dst=ranks.of_job(part.move.target), group=group)
                else:
                    dist.recv(chunk, src=ranks.of_job(part.move.source), group=group)

    def keep() -> None:
        for part in parts:
            if part.move.target == ranks.rank:
                told = part.move.info
                memory.bring(
                    MemorySnapshot.of(os.dup(part.fd), told.step, told.save, bytes(part.notes))
                )

    try:
        ranks.together(prepare)
        ranks.together(make_group)
        ranks.together_at_length(send_and_receive)
        ranks.together(keep)
    except (
        Exception
    ) as error:  # gloo's are RuntimeErrors, on one rank alone; the disk has it as well
        return f"it could not be had from the peers ({error})"
    finally:
        ranks.release(group)
        for part in parts:
            if part.move.target == ranks.rank:
                os.close(part.fd)
    memory.from_peers()
    return ""


class _Part(NamedTuple):
    """What a move reads or fills; `fd` is the image's."""

    move: Move
    fd: int
    image: memoryview
    notes: bytearray


def _lying(memory: PreviousRanks, move: Move) -> _Part:
    for kept in memory.take(move.info.step, move.info.save):
        if kept.layout.rank == move.target and len(kept.notes) == move.info.notes_bytes:
            return _Part(move, kept.fd, _image(move, kept.fd), bytearray(kept.notes))
    raise CheckpointError(
        f"Rank {move.source} has rank {move.target}'s snapshot no more. It is read from disk."
    )


def _room(move: Move) -> _Part:
    needed = PAGE_BYTES + move.info.image_bytes
    with reserved(needed) as free:
        if free < needed:
            raise CheckpointError(
                f"Rank {move.target} needs {needed:,} bytes of memory, and {max(free, 0):,} are free there."
            )
        fd = os.memfd_create("holdfast-brought", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, needed)
            return _Part(move, fd, _image(move, fd), bytearray(move.info.notes_bytes))
        except BaseException:
            os.close(fd)
            raise


def _image(move: Move, fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, PAGE_BYTES + move.info.image_bytes))[PAGE_BYTES:]


def _chunks(part: _Part) -> Iterator[torch.Tensor]:
    for memory in (memoryview(part.notes), part.image):
        for at in range(0, len(memory), _CHUNK_BYTES):
            yield torch.frombuffer(memory[at : at + _CHUNK_BYTES], dtype=torch.uint8)
