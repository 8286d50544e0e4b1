"""Send memory snapshots to ranks that restarted on a node without their snapshot.

All ranks list the snapshots on their nodes. If a rank's snapshot is on another node, a rank on that
node sends it, over a separate process group. The receiver keeps the snapshot in memory, and
verifies it like any other snapshot.
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
"""The timeout of a transfer, in which a rank may wait while the source serves other ranks.

A dead peer is detected at once.
"""
_CHUNK_BYTES: Final = 64 << 20


class Move(NamedTuple):
    """Describe one transfer: rank `source` sends the snapshot of rank `target` to rank `target`."""

    source: int
    target: int
    info: SnapshotInfo


def newest_whole(
    listed: Sequence[Sequence[SnapshotInfo]], world_size: int
) -> tuple[int, str] | None:
    """Find the newest save for which every rank's snapshot is in some node's memory.

    Args:
        listed: for each rank, the snapshots on its node.
        world_size: the number of ranks; snapshots of jobs with another number are ignored.

    Returns:
        The step and the name of the save; None if there is no such save.
    """
    ranks: dict[tuple[int, str], set[int]] = {}
    for image in (image for each in listed for image in each if image.world_size == world_size):
        ranks.setdefault((image.step, image.save), set()).add(image.rank)
    return max((save for save, having in ranks.items() if len(having) == world_size), default=None)


def moves(listed: Sequence[Sequence[SnapshotInfo]], save: tuple[int, str]) -> list[Move]:
    """Plan the transfers that bring each rank its snapshot.

    The transfers are spread evenly over the ranks that can send.

    Args:
        listed: for each rank, the snapshots on its node.
        save: the step and the name of a save that `newest_whole` found.
    """
    having: dict[int, list[tuple[int, SnapshotInfo]]] = {}
    for rank, each in enumerate(listed):
        for image in each:
            if (image.step, image.save) == save:
                having.setdefault(image.rank, []).append((rank, image))
    sending = [0] * len(listed)
    found = []
    for target in range(len(listed)):
        sources = dict(having[target])
        if target not in sources:
            source = min(sources, key=lambda rank: (sending[rank], rank))
            sending[source] += 1
            found.append(Move(source, target, sources[source]))
    return found


def bring(ranks: Ranks, memory: PreviousRanks, planned: Sequence[Move]) -> str:
    """Perform the planned transfers of snapshots. Collective.

    Returns:
        The reason why the transfers failed, the same on all ranks; empty if they succeeded.
    """
    if not planned:
        return ""
    own = [move for move in planned if ranks.rank in (move.source, move.target)]
    parts: list[_Part] = []
    group: dist.ProcessGroup | None = None

    # Steps that can fail on a single rank come first. If a rank failed during the transfers,
    # another rank would wait for it.
    def prepare() -> None:
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
                info = part.move.info
                memory.bring(
                    MemorySnapshot.of(os.dup(part.fd), info.step, info.save, bytes(part.notes))
                )

    try:
        ranks.together(prepare)
        ranks.together(make_group)
        ranks.together_at_length(send_and_receive)
        ranks.together(keep)
    # gloo raises RuntimeError on one rank alone. The checkpoint is on disk as well.
    except Exception as error:
        return f"it could not be received from the peers ({error})"
    finally:
        ranks.release(group)
        for part in parts:
            if part.move.target == ranks.rank:
                os.close(part.fd)
    memory.from_peers()
    return ""


class _Part(NamedTuple):
    """Hold the memory that one transfer reads or fills; `fd` is the descriptor of this memory."""

    move: Move
    fd: int
    image: memoryview
    notes: bytearray


def _lying(memory: PreviousRanks, move: Move) -> _Part:
    for kept in memory.take(move.info.step, move.info.save):
        if kept.layout.rank == move.target and len(kept.notes) == move.info.notes_bytes:
            return _Part(move, kept.fd, _image(move, kept.fd), bytearray(kept.notes))
    raise CheckpointError(
        f"Rank {move.source} no longer has rank {move.target}'s snapshot. It is read from disk."
    )


def _room(move: Move) -> _Part:
    needed = PAGE_BYTES + move.info.image_bytes
    with reserved(needed) as free:
        if free < needed:
            raise CheckpointError(
                f"Rank {move.target} needs {needed:,} bytes of memory, and {max(free, 0):,} are "
                "free there."
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
