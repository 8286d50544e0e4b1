"""One save in the writing process: an image to durable files, attested, and its part in the commit.

Nothing here needs torch.
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
    """What was written is not what the live tensors were; `pieces` are the indices of those that differ."""

    def __init__(self, pieces: list[int]) -> None:
        super().__init__("what was staged differs from the live tensors")
        self.pieces = pieces


@dataclass(frozen=True, kw_only=True)
class RankWrite:
    """One rank's part of a save, and whom to ask and to tell meanwhile.

    Attributes:
        order: the save.
        layout: of the image.
        image: the memory of the image, which may still be copied into.
        live: the digests of the live tensors, piece by piece, once the image is sealed; None: the save is not attested.
        await_copy: returns once so many bytes of the image are there; with None, once all of it is sealed. It raises
            where that will never be.
        wait: called while other ranks are waited for; raises where there has been enough of it.
        pace: a limit to the rate.
        progress: told the bytes of each chunk that is written.
        blocks: gets the digests of each file's blocks, by its name.
        replicas: the digests of what other ranks have as well (`replica_notes.pack`); empty: nothing is compared.
        refuses: the save fails where such entries differ.
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
    """Write a rank's part of a save and see the save through. Once it returns, the checkpoint is durable.

    Returns:
        On rank 0, what differs between ranks that have it alike; nothing where that was not compared.

    Raises:
        NotAttested: the image is not what `live` was taken of.
        RankFailed: another rank could not write its part.
        ManifestError: what a rank says is not what its files are.
        OSError: it is not durable.
    """
    if is_committed(
        part.order
    ):  # by a process that died before it could say so, and maybe before the name was durable
        fsync_folder(part.order.folder)
        return Differing()
    return _see_through(part)


def abandon(order: SaveRequest, layout: Layout, why: str, *, errno: int | None = None) -> None:
    """Tell the other ranks why this one gives up a save that no process of its own writes, where that can be told."""
    with contextlib.suppress(
        RankFailed, OSError
    ):  # rank 0 has given it up already; or the storage does not take it
        if layout.rank and not is_committed(order):
            _join(order)
        leave_failure(order, layout.rank, layout.world_size, RankFailed(why, errno))


def discard_abandoned(order: SaveRequest, layout: Layout) -> None:
    """Delete what there is of a save that was given up; of another rank's part rank 0 takes care, once it has heard."""
    with contextlib.suppress(OSError):  # a later first save tries again
        if layout.rank == 0 and order.staging.exists():
            discard(order.staging)


def delete_leftovers(order: SaveRequest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Delete what dead processes left, but for those that wrote for the same trainer; what cannot be is logged.

    `progress` is told 1 after each file.
    """
    try:
        remove_leftovers(order.folder, but_of=order.session, progress=progress)
    except OSError as error:
        _logger.warning("What dead processes left in %s was not deleted: %s", order.folder, error)


def delete_superfluous(
    order: SaveRequest, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Delete what need not be kept now that this save is durable; what cannot be deleted is logged.

    `progress` is told 1 after each file.
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
    """After a save that failed because the disk is full, delete the oldest checkpoint that may go, and return it.

    Nothing is deleted where the disk has room again, or where the newest checkpoint that stays does not verify. What
    is deleted, and what cannot be, is logged.

    Args:
        order: the save.
        code: the number of the system's error; without one of `FULL` nothing is done.
        needed_bytes: at least so many are needed, or as many as the newest checkpoint has.
        progress: called with 1 after each file.
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
                "%s is full, and nothing is deleted: none of the others is whole.", order.folder
            )
            return None
        free_bytes = shutil.disk_usage(order.folder).free
        if code == errno.ENOSPC and free_bytes > max(
            newest.size_bytes, needed_bytes
        ):  # of a quota it says nothing
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
            fsync_folder(order.folder)  # rank 0 gives the name before it is durable
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
        if staging is not None:  # after the reason is there: others may fail for want of the folder
            staging.abandon()
        if layout.rank:
            retract(order, layout.rank, [name for shard in layout.shards for name in _names(shard)])
            if isinstance(
                error, OSError
            ):  # the folder may be gone because rank 0 has failed: that is the reason
                check_not_failed(order)
        raise


def _join(order: SaveRequest) -> None:
    """Have the folder that rank 0 may not have made yet."""
    check_not_failed(order)
    order.staging.mkdir(exist_ok=True)


def _write(part: RankWrite) -> list[FileEntry]:
    """This rank's files, and that they are what was live."""
    part.await_copy(0)  # for one that was given up no space is taken
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
    """One file of the image and its sidecar, durable; the digests of its pieces, where they are attested.

    Raises:
        OSError: it is not durable.
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
