"""Carry out one save in the writing process: write a snapshot to files, attest them, and commit.

This module needs no torch.
"""

import contextlib
import errno
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan, verify
from holdfast.checkpoint.catalog.pruning import delete_unclaimed
from holdfast.checkpoint.catalog.retention import deletable_for_room, is_damaged, superfluous
from holdfast.checkpoint.catalog.staging_dir import Staging, discard, remove_leftovers
from holdfast.checkpoint.format.checksums import (
    DIGEST_BYTES,
    SIDECAR_SUFFIX,
    checksum_of_digests,
    write_sidecar,
)
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.checkpoint.format.rank_layout import Layout, Piece, Shard
from holdfast.checkpoint.format.replica_digests import Differing
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.writer.commit import (
    FULL,
    RankFailed,
    await_commit,
    check_lease,
    check_not_failed,
    commit,
    has_left_note,
    is_committed,
    leave_failure,
    leave_note,
    retract,
)
from holdfast.checkpoint.writer.direct_io import write_file
from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import HoldfastError
from holdfast.core.rate_limit import RateLimit

_logger = logging.getLogger("holdfast")


class NotAttested(RankFailed):
    """Report that written bytes differ from the live tensors, in the layout's `pieces`."""

    def __init__(self, pieces: list[int]) -> None:
        super().__init__("the staged copy differs from the live tensors")
        self.pieces = pieces


@dataclass(frozen=True, kw_only=True)
class RankWrite:
    """Describe one rank's part of a save, and the functions to call while it is written.

    The image is the snapshot in memory, with the same bytes as the rank's files. A piece is a byte
    range of the image with its own digest.

    Attributes:
        order: the request that describes the save.
        layout: the layout of the image.
        image: the memory of the image; the trainer may still be copying into it.
        live: the digests of the live tensors, piece by piece, which are complete once the image is
            sealed; None if the save is not attested.
        await_copy: called with a number N, returns once the first N bytes of the image are copied.
            Called with None, returns once the image is sealed. Raises an error if the copy was
            given up.
        wait: called repeatedly while this rank waits for other ranks; raises an error once the wait
            is too long.
        pace: the limit on the write rate.
        progress: called after each written chunk with its size in bytes.
        blocks: a dict that receives the block digests of each written file, by file name.
        replicas: the digests of entries that other ranks have as well (`replica_digests.pack`);
            empty if this save does not compare them.
        refuses: whether the save fails if such entries differ.
    """

    order: SaveRequest
    layout: Layout
    image: memoryview
    live: bytes | memoryview | None
    await_copy: Callable[[int | None], None]
    wait: Callable[[], None]
    pace: RateLimit
    progress: Callable[[int], None]
    blocks: dict[str, bytes] = field(default_factory=dict)
    replicas: bytes = b""
    refuses: bool = False


def persist(part: RankWrite) -> Differing:
    """Write a rank's part of a save and wait for the commit; the checkpoint is then durable.

    Returns:
        On rank 0, the replicated entries that differ, if they were compared.

    Raises:
        NotAttested: the written bytes differ from the live tensors.
        RankFailed: another rank could not write its part.
        ManifestError: a rank's note does not match its files.
        OSError: the checkpoint is not durable.
    """
    # If this is a repeated request, a former process may have committed the save and died before
    # its report, perhaps even before the rename was durable.
    if is_committed(part.order):
        fsync_folder(part.order.folder)
        return Differing()
    return _see_through(part)


def abandon(order: SaveRequest, layout: Layout, why: str, *, errno: int | None = None) -> None:
    """Write a note for the other ranks that this rank gives up a save.

    The trainer calls this function if no writing process can do so.

    An error while writing the note is ignored.
    """
    # Rank 0 may have given up the save already, or the storage may fail.
    with contextlib.suppress(RankFailed, OSError):
        if layout.rank and not is_committed(order):
            _join(order)
        leave_failure(order, layout.rank, layout.world_size, RankFailed(why, errno))


def discard_abandoned(order: SaveRequest, layout: Layout) -> None:
    """Delete the files of a save that was given up.

    On rank 0, the files of all ranks are deleted. On other ranks, nothing is done.
    """
    with contextlib.suppress(OSError):  # the first save of a later process tries again
        if layout.rank == 0 and order.staging.exists():
            discard(order.staging)


def delete_leftovers(order: SaveRequest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Delete unfinished files that dead processes left, except files of this trainer's processes.

    Errors are logged. `progress` is called with 1 after each file.
    """
    try:
        remove_leftovers(order.folder, but_of=order.session, progress=progress)
    except OSError as error:
        _logger.warning("Files of dead processes in %s were not deleted: %s", order.folder, error)


def delete_superfluous(
    order: SaveRequest, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Delete the checkpoints that the retention policy does not keep after this save.

    Errors are logged. `progress` is called with 1 after each file.
    """
    try:
        found = scan(order.folder)
    except (OSError, HoldfastError) as error:
        _logger.warning("Old checkpoints were not deleted: %s", error)
        return
    damaged = set(order.damaged) - {order.final}
    now_s = order.created_at_s
    for info in superfluous(
        found, committed=order.final, damaged=damaged, keep=order.keep, now_s=now_s
    ):
        try:
            delete_unclaimed(info, now_s=now_s, progress=progress)
        except (OSError, HoldfastError) as error:
            _logger.warning("%s was not deleted: %s", info.path, error)


def make_room(
    order: SaveRequest, code: int | None, needed_bytes: int, progress: Callable[[int], None]
) -> CheckpointInfo | None:
    """Delete the oldest checkpoint that may be deleted, after a save failed on a full disk.

    Nothing is deleted if the disk has room again. Nothing is deleted either if the newest
    checkpoint that would stay does not verify. Deletions and errors are logged.

    Args:
        order: the save that failed.
        code: the system's error number; nothing is done unless it is one of `FULL`.
        needed_bytes: the size of this rank's part. The disk has room if more is free than both this
            and the size of the newest checkpoint that would stay.
        progress: called with 1 after each file.

    Returns:
        The deleted checkpoint, or None.
    """
    if code not in FULL:
        return None
    try:
        found = scan(order.folder)
        going = deletable_for_room(
            found, damaged=order.damaged, keep=order.keep, now_s=order.created_at_s
        )
        if not going:
            return None
        good = (info for info in found if info not in going and not is_damaged(info, order.damaged))
        if (newest := next((info for info in good if not info.abandoned), None)) is None:
            _logger.warning(
                "%s is full, and nothing is deleted: no other checkpoint is complete.", order.folder
            )
            return None
        free_bytes = shutil.disk_usage(order.folder).free
        # Free space does not show whether a quota has room.
        if code == errno.ENOSPC and free_bytes > max(newest.size_bytes, needed_bytes):
            return None
        if (
            not newest.marks.verified
            and verify(newest, progress=lambda *_: progress(1)).state != "verified"
        ):
            _logger.warning(
                "%s is full, and nothing is deleted: %s does not verify.", order.folder, newest.path
            )
            return None
        for info in going:
            if (
                claim := delete_unclaimed(info, now_s=order.created_at_s, progress=progress)
            ) is None:
                _logger.warning("%s is full: %s was deleted to make room.", order.folder, info.path)
                return info
            _logger.debug("%s stays: %s", info.path, claim)
    except (OSError, HoldfastError) as failed:
        _logger.warning("%s is full, and nothing was deleted: %s", order.folder, failed)
    return None


def _see_through(part: RankWrite) -> Differing:
    order, layout = part.order, part.layout
    staging = None
    try:
        if layout.rank:
            _join(order)
        else:
            check_lease(order)
            staging = Staging(order.folder, order.step, order.save)
        if not has_left_note(order, layout.rank):
            leave_note(order, layout.rank, _write(part), part.replicas)
        if staging is None:
            await_commit(order, part.wait)
            fsync_folder(order.folder)  # rank 0's rename may not be durable yet
            return Differing()
        return commit(
            order,
            staging,
            world_size=layout.world_size,
            torch=layout.torch,
            metadata=layout.metadata,
            wait=part.wait,
            replicated=layout.replicated,
            refuses=part.refuses,
        )
    except BaseException as error:
        if isinstance(error, Exception):
            leave_failure(order, layout.rank, layout.world_size, error)
        if staging is not None:  # after the failure note, since other ranks fail without the folder
            staging.abandon()
        if layout.rank:
            retract(order, layout.rank, [name for shard in layout.shards for name in _names(shard)])
            # If the folder is gone because rank 0 has failed, report rank 0's reason.
            if isinstance(error, OSError):
                check_not_failed(order)
        raise


def _join(order: SaveRequest) -> None:
    """Make the staging folder if it is missing; raise an error if rank 0 has given up the save."""
    check_not_failed(order)
    order.staging.mkdir(exist_ok=True)


def _write(part: RankWrite) -> list[FileEntry]:
    """Write this rank's files, and compare their digests with the live tensors' digests."""
    part.await_copy(0)  # raises for a save that was given up, before any space is taken
    files, found = [], b""
    for shard in part.layout.shards:
        entry, digests = write_shard(part, shard)
        files.append(entry)
        found += digests
    part.await_copy(None)
    _attest(found, None if part.live is None else bytes(part.live))
    return files


def _names(shard: Shard) -> tuple[str, str]:
    return shard.name, shard.name + SIDECAR_SUFFIX


def write_shard(part: RankWrite, shard: Shard) -> tuple[FileEntry, bytes]:
    """Write one file of the snapshot, and its sidecar, which holds the digests of its blocks.

    Returns:
        The file's entry for the manifest, and the digests of its pieces if the save is attested.

    Raises:
        OSError: the file is not durable.
    """
    begin, end = shard.offset, shard.offset + shard.size_bytes
    attested = () if part.live is None else part.layout.pieces
    own = [
        Piece(piece.offset - begin, piece.length)
        for piece in attested
        if begin <= piece.offset < end
    ]
    path = part.order.staging / shard.name
    written = write_file(
        path,
        part.image[begin:],
        shard.size_bytes,
        own,
        pace=part.pace,
        await_bytes=lambda count: part.await_copy(begin + count),
        progress=part.progress,
    )
    write_sidecar(path, written.blocks)
    part.blocks[shard.name] = written.blocks
    checksum = checksum_of_digests(written.blocks)
    return FileEntry(
        path=shard.name, size_bytes=shard.size_bytes, checksum=checksum
    ), written.pieces


def _attest(found: bytes, live: bytes | None) -> None:
    if live is not None and found != live:
        each = range(0, max(len(found), len(live)), DIGEST_BYTES)
        differing = [
            at for at in each if found[at : at + DIGEST_BYTES] != live[at : at + DIGEST_BYTES]
        ]
        raise NotAttested([at // DIGEST_BYTES for at in differing])
