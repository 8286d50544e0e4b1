"""Make one checkpoint of all ranks' files, using only the checkpoint folder.

The ranks exchange no messages, so a commit succeeds even if all trainers have died. Each rank's
writing process writes its files into the same staging folder, and then a note that lists them. Rank
0's process waits for all notes, checks them against the files, writes the metadata and the
manifest, and renames the folder. The other processes wait for the renamed folder, or for a note
that rank 0 has failed. This module needs no torch.
"""

import errno
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.catalog.annotations import note_metrics
from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.catalog.lineage import left_behind, note_abandoned, read_abandoned
from holdfast.checkpoint.catalog.staging_dir import Staging
from holdfast.checkpoint.catalog.writer_lease import read_holder
from holdfast.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    Save,
    check_sizes,
    describe_file,
    read_manifest,
    write_manifest,
)
from holdfast.checkpoint.format.paths import METADATA_NAME, failure_path, parse_name, step_path
from holdfast.checkpoint.format.replica_digests import Differing, compare
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.core.atomic import write_atomic
from holdfast.core.system_limits import in_words

_PER_RANK: Final = (
    "Put what differs by rank under per_rank, or make it the same on all ranks before the save."
)

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a full disk and of an exhausted quota."""
_NO_ROOM_TO_SAY: Final = {
    "failed": "the disk is too full to record the reason",
    "errno": errno.ENOSPC,
}
"""The content that is assumed for an empty failure note.

A note is empty if the disk was full, because a full disk still has room for an empty file.
"""


class RankFailed(Exception):
    """Report that a rank could not write its part of a save.

    Attributes:
        errno: the system's error number, if there is one.
        advice: a sentence that names the next step for the user, or "".
        is_final: whether another save would fail for the same reason.
    """

    def __init__(
        self, reason: str, errno: int | None = None, advice: str = "", *, is_final: bool = False
    ) -> None:
        super().__init__(reason)
        self.errno = errno
        self.advice = advice
        self.is_final = is_final


def leave_note(
    order: SaveRequest, rank: int, files: Sequence[FileEntry], replicas: bytes = b""
) -> None:
    """Write the note that lists this rank's files, which are durable.

    `replicas` holds the digests of replicated entries, see `replica_digests.pack`.

    Raises:
        OSError: the note cannot be written.
    """
    note: dict[str, Any] = {"files": [asdict(entry) for entry in files]}
    if replicas:
        # The digests have a separate file. Ranks with equal digests have equal files, so the commit
        # reads only one of these.
        _replicas(order, rank).write_bytes(replicas)
        note["replicas"] = xxhash.xxh3_128_hexdigest(replicas)
    write_atomic(_note(order, rank), json.dumps(note).encode())


def leave_failure(order: SaveRequest, rank: int, world_size: int, error: Exception) -> None:
    """Write a note with the reason why this rank has failed.

    Rank 0 reads the notes of the other ranks, and the other ranks read rank 0's note. An error
    while writing the note is ignored.
    """
    note = {"failed": in_words(error), "errno": getattr(error, "errno", None)}
    if advice := getattr(error, "advice", ""):
        note["advice"] = advice
    if getattr(error, "is_final", False):
        note["is_final"] = True
    path = failure_path(order.folder, order.step, order.save) if rank == 0 else _note(order, rank)
    if world_size == 1:
        return
    try:
        write_atomic(path, json.dumps(note).encode())
    except OSError as failed:
        with suppress(OSError):
            if failed.errno in FULL:
                path.touch()
            elif failed.errno == errno.EFBIG:  # the file size limit; a shorter note may fit
                write_atomic(
                    path,
                    json.dumps({"failed": os.strerror(errno.EFBIG), "errno": errno.EFBIG}).encode(),
                )


def is_committed(order: SaveRequest) -> bool:
    """Return True if the final folder holds the checkpoint of this save, not of another save."""
    try:
        return read_manifest(order.final, step=order.step).save == order.save
    except (ManifestError, OSError):
        return False


def await_commit(order: SaveRequest, wait: Callable[[], None]) -> None:
    """Wait until rank 0 has committed this save.

    Raises:
        RankFailed: rank 0 could not commit.
    """
    while not is_committed(order):
        check_not_failed(order)
        wait()


def commit(
    order: SaveRequest,
    staging: Staging,
    *,
    world_size: int,
    torch: str,
    metadata: bytes,
    wait: Callable[[], None],
    replicated: Sequence[str] = (),
    refuses: bool = False,
) -> Differing:
    """Wait for the files of all ranks, and make one checkpoint of them. Called on rank 0 only.

    Args:
        order: the save.
        staging: the staging folder, which this process has locked.
        world_size: the number of ranks; each writes one note.
        torch: the version of torch that the state comes from.
        metadata: the content of the file `.metadata`.
        wait: called while notes are missing; sleeps, and raises an error once the wait is too long.
        replicated: the names of the entries that several ranks have.
        refuses: whether the save fails if replicated entries differ.

    Returns:
        The replicated entries that differ between ranks, if digests were written for them.

    Raises:
        RankFailed: a rank could not write its part, or replicas differ and `refuses` is true.
        ManifestError: a rank's note does not match its files.
        OSError: the checkpoint is not durable.
    """
    differing = Differing()
    if not _is_prepared(order):
        notes = _await_notes(order, world_size, wait)
        differing = _compare(order, notes, replicated)
        if differing.count and refuses:
            raise RankFailed(
                f"the state differs by rank: {differing}", advice=_PER_RANK, is_final=True
            )
        _prepare(order, notes, torch=torch, metadata=metadata)
    # Not earlier: a process that resumes after a crash needs the notes or the manifest.
    for rank in range(world_size):
        _note(order, rank).unlink(missing_ok=True)
    for unfinished in order.staging.glob(".*.tmp"):
        unfinished.unlink()
    if order.metrics:  # now, because the deletions after this save select by metrics
        note_metrics(order.staging, order.metrics, now_s=order.created_at_s)
    if order.lease is not None:
        check_lease(order)
        _leave_behind(order, _parent(order))
    staging.commit(final_is_damaged=order.final in order.damaged)
    return differing


def check_lease(order: SaveRequest) -> None:
    """Check that no other process has acquired the right to write into the folder.

    Raises:
        RankFailed: another process has acquired the right.
    """
    holder = read_holder(order.folder) if order.lease else None
    if holder is not None and holder.token != order.lease:
        raise RankFailed(
            f"{order.folder} has been taken over by {holder}. This process must end", is_final=True
        )


def has_left_note(order: SaveRequest, rank: int) -> bool:
    """Return True if this rank's note was written; rank 0 may have read and deleted it since."""
    note = _read(_note(order, rank))
    return (note is not None and "failed" not in note) or _is_prepared(order)


def check_not_failed(order: SaveRequest) -> None:
    """Check that rank 0 has not given up the save.

    Raises:
        RankFailed: rank 0 has given up the save.
    """
    if (note := _read(failure_path(order.folder, order.step, order.save))) is not None:
        raise _failed(note)


def retract(order: SaveRequest, rank: int, names: Sequence[str]) -> None:
    """If rank 0 has given up the save, delete this rank's files; rank 0 deletes all others."""
    try:
        check_not_failed(order)
    except RankFailed:
        with suppress(OSError):
            own = (_note(order, rank), _replicas(order, rank))
            for path in (*(order.staging / name for name in names), *own):
                path.unlink(missing_ok=True)
            order.staging.rmdir()


def _await_notes(
    order: SaveRequest, world_size: int, wait: Callable[[], None]
) -> list[dict[str, Any]]:
    """Wait for the notes of all ranks, and return them in rank order."""
    notes: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(world_size):
            if rank in notes or (note := _read(_note(order, rank))) is None:
                continue
            if "failed" in note:
                raise _failed(note, f"rank {rank}: ")
            notes[rank] = note
        if len(notes) == world_size:
            return [notes[rank] for rank in range(world_size)]
        wait()


def _compare(
    order: SaveRequest, notes: Sequence[dict[str, Any]], names: Sequence[str]
) -> Differing:
    alike: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        if "replicas" in note:
            alike.setdefault(note["replicas"], []).append(rank)
    if len(alike) < 2:
        return Differing()
    return compare(
        [(ranks, _replicas(order, ranks[0]).read_bytes()) for ranks in alike.values()], names
    )


def _prepare(
    order: SaveRequest, notes: Sequence[dict[str, Any]], *, torch: str, metadata: bytes
) -> None:
    """Check the notes of all ranks against the files, and write the metadata and the manifest."""
    files = [FileEntry(**entry) for note in notes for entry in note["files"]]
    check_sizes(order.staging, files)
    write_atomic(order.staging / METADATA_NAME, metadata)
    files.append(describe_file(order.staging, METADATA_NAME))
    manifest = Manifest(
        step=order.step,
        world_size=len(notes),
        created_at_s=order.created_at_s,
        torch=torch,
        save=order.save,
        run=order.run,
        parent=_parent(order),
        files=tuple(sorted(files, key=lambda entry: entry.path)),
    )
    write_manifest(order.staging, manifest)


def _parent(order: SaveRequest) -> Save | None:
    """Return the save that this one continues: the newest ancestor whose checkpoint exists.

    If none exists, return the oldest ancestor, which is the restored checkpoint; it was deleted
    since.
    """
    earlier = [each for each in order.ancestors if each.step < order.step]
    for each in earlier:
        with suppress(ManifestError, OSError):
            if read_manifest(step_path(order.folder, each.step), step=each.step).save == each.save:
                return each
    return earlier[-1] if earlier else None


def _failed(note: dict[str, Any], of: str = "") -> RankFailed:
    final = note.get("is_final", False)
    return RankFailed(of + note["failed"], note["errno"], note.get("advice", ""), is_final=final)


def _leave_behind(order: SaveRequest, parent: Save | None) -> None:
    """Record the checkpoints that this save abandons, before this save is committed.

    Raises:
        OSError: the list could not be written.
    """
    abandoned = read_abandoned(order.folder)
    beyond = order.step if parent is None else parent.step
    steps = (name[0] for path in order.folder.iterdir() if (name := parse_name(path.name)))
    if parent not in abandoned and all(step <= beyond for step in steps):  # in nearly all cases
        return
    left = left_behind(scan(order.folder), abandoned, step=order.step, parent=parent)
    # A checkpoint of the same step is not abandoned if the state descends from it.
    left -= {each for each in order.ancestors if each.step == order.step}
    if left != abandoned:
        note_abandoned(order.folder, left)


def _is_prepared(order: SaveRequest) -> bool:
    try:
        return read_manifest(order.staging, step=order.step).save == order.save
    except (ManifestError, OSError):
        return False


def _note(order: SaveRequest, rank: int) -> Path:
    return order.staging / f"rank-{rank}.note"


def _replicas(order: SaveRequest, rank: int) -> Path:
    # The suffix marks the file as unfinished, so that later cleanups delete it.
    return order.staging / f".rank-{rank}.replicas.tmp"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    note: dict[str, Any] = json.loads(data) if data else _NO_ROOM_TO_SAY
    return note
