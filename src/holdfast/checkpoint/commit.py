"""How the ranks' files become one checkpoint: through the checkpoint folder alone, whoever of the trainers still lives.

Each rank's writing process puts its files into the same hidden folder, and beside them a note of what they are. That of
rank 0 waits for all notes, checks them against the files, writes metadata and manifest, and gives the folder its name.
The others wait for that, or for the reason why not. Nothing here needs torch.
"""

import errno
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from holdfast.checkpoint.catalog import scan
from holdfast.checkpoint.folders import Staging, failure_path, parse_name, staging_path, step_path
from holdfast.checkpoint.lease import read_holder
from holdfast.checkpoint.lineage import left_behind, note_abandoned, read_abandoned
from holdfast.checkpoint.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    Save,
    check_sizes,
    describe_file,
    read_manifest,
    write_manifest,
)
from holdfast.checkpoint.retention import Best, Retention
from holdfast.core.atomic import write_atomic

METADATA_NAME: Final = ".metadata"
_DAMAGED: Final = 1000
"""Only the newest are told of: older ones go by no rule that a message could be too long for."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TO_SAY: Final = {"failed": "no room is left to say why", "errno": errno.ENOSPC}
"""What an empty file tells, for which a full disk has room."""


class RankFailed(Exception):
    """A rank could not write its part; `errno` where the system said why."""

    def __init__(self, reason: str, errno: int | None = None) -> None:
        super().__init__(reason)
        self.errno = errno


class Fenced(RankFailed):
    """Another process has taken over the folder."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One save.

    `save` tells it from every other one; `keep` and `damaged` are for what is deleted after it. `run` and `lease` (its
    token) are the writer's, see `lease`; the token is empty where there is no lease, and None where steps are no line
    of one training, so that none is abandoned. `ancestors`: what was saved or
    restored before, newest first, of which some may have failed: the newest that is there is the parent.
    """

    folder: Path
    step: int
    save: str
    created_at_s: float
    keep: Retention
    damaged: tuple[Path, ...] = ()
    run: str = ""
    lease: str | None = None
    ancestors: tuple[Save, ...] = ()

    @property
    def session(self) -> str:
        """What the `save` of all of one trainer's begins with, before a hyphen."""
        return self.save.rpartition("-")[0]

    @property
    def staging(self) -> Path:
        """The folder that it is written into."""
        return staging_path(self.folder, self.step, self.save)

    @property
    def final(self) -> Path:
        """The name that this folder gets."""
        return step_path(self.folder, self.step)

    def as_json(self) -> dict[str, Any]:
        """For a message."""
        damaged = sorted(path.name for path in self.damaged)[-_DAMAGED:]
        return {**asdict(self), "folder": str(self.folder), "damaged": damaged}

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> Self:
        """What `as_json` told."""
        best = tuple(Best(**each) for each in told["keep"]["best"])
        keep = Retention(**{**told["keep"], "best": best})
        folder = Path(told["folder"])
        damaged = tuple(folder / name for name in told["damaged"])
        ancestors = tuple(Save(**each) for each in told["ancestors"])
        return cls(**{**told, "folder": folder, "keep": keep, "damaged": damaged, "ancestors": ancestors})


def leave_note(order: Order, rank: int, files: Sequence[FileEntry]) -> None:
    """Say that this rank's files are durable, and what they are.

    Raises:
        OSError: it cannot be said.
    """
    write_atomic(_note(order, rank), json.dumps({"files": [asdict(entry) for entry in files]}).encode())


def leave_failure(order: Order, rank: int, world_size: int, error: Exception) -> None:
    """Say why the save cannot be, if that can be said at all: to rank 0, and by rank 0 to the others."""
    told = {"failed": str(error), "errno": getattr(error, "errno", None)}
    path = failure_path(order.folder, order.step, order.save) if rank == 0 else _note(order, rank)
    if world_size == 1:
        return
    try:
        write_atomic(path, json.dumps(told).encode())
    except OSError as failed:
        if failed.errno in _FULL:
            with suppress(OSError):
                path.touch()


def is_committed(order: Order) -> bool:
    """Whether this very save has its name."""
    try:
        return read_manifest(order.final, step=order.step).save == order.save
    except (ManifestError, OSError):
        return False


def await_commit(order: Order, wait: Callable[[], None]) -> None:
    """Wait until rank 0 has made a checkpoint of this save.

    Raises:
        RankFailed: it could not.
    """
    while not is_committed(order):
        check_not_failed(order)
        wait()


def commit(
    order: Order, staging: Staging, *, world_size: int, torch: str, metadata: bytes, wait: Callable[[], None]
) -> None:
    """Make one checkpoint of what all ranks have written.

    Args:
        order: the save.
        staging: its folder, which this process holds.
        world_size: how many notes there will be.
        torch: the version of torch that the state comes from.
        metadata: the content of `.metadata`.
        wait: called between two looks for notes; raises where there has been enough waiting.

    Raises:
        RankFailed: a rank could not write its part.
        ManifestError: what a rank says is not what its files are.
        OSError: it is not durable.
    """
    if not _is_prepared(order):
        _prepare(order, world_size=world_size, torch=torch, metadata=metadata, wait=wait)
    # Only now: whoever takes this up after a crash finds the notes or the manifest.
    for rank in range(world_size):
        _note(order, rank).unlink(missing_ok=True)
    for unfinished in order.staging.glob(".*.tmp"):
        unfinished.unlink()
    if order.lease is not None:
        _check_lease(order)
        _leave_behind(order, _parent(order))
    staging.commit(final_is_damaged=order.final in order.damaged)


def has_left_note(order: Order, rank: int) -> bool:
    """Whether this rank's files are durable, and rank 0 knows or knew of it."""
    told = _read(_note(order, rank))
    return (told is not None and "failed" not in told) or _is_prepared(order)


def check_not_failed(order: Order) -> None:
    """Whether there is still a point in writing.

    Raises:
        RankFailed: rank 0 has given the save up.
    """
    if (told := _read(failure_path(order.folder, order.step, order.save))) is not None:
        raise RankFailed(told["failed"], told["errno"])


def retract(order: Order, rank: int, names: Sequence[str]) -> None:
    """Take back what this rank has written of a save that rank 0 has given up; of any other rank 0 takes care."""
    try:
        check_not_failed(order)
    except RankFailed:
        with suppress(OSError):
            for path in (*(order.staging / name for name in names), _note(order, rank)):
                path.unlink(missing_ok=True)
            order.staging.rmdir()


def _prepare(order: Order, *, world_size: int, torch: str, metadata: bytes, wait: Callable[[], None]) -> None:
    """Wait for all notes, check them against the files, and write what makes a checkpoint of these."""
    missing, files = set(range(world_size)), list[FileEntry]()
    while True:
        for rank in sorted(missing):
            if (told := _read(_note(order, rank))) is None:
                continue
            if "failed" in told:
                raise RankFailed(f"rank {rank}: {told['failed']}", told["errno"])
            files += (FileEntry(**entry) for entry in told["files"])
            missing.discard(rank)
        if not missing:
            break
        wait()
    check_sizes(order.staging, files)
    write_atomic(order.staging / METADATA_NAME, metadata)
    files.append(describe_file(order.staging, METADATA_NAME))
    manifest = Manifest(
        step=order.step,
        world_size=world_size,
        created_at_s=order.created_at_s,
        torch=torch,
        save=order.save,
        run=order.run,
        parent=_parent(order),
        files=tuple(sorted(files, key=lambda entry: entry.path)),
    )
    write_manifest(order.staging, manifest)


def _parent(order: Order) -> Save | None:
    """Return the newest ancestor that is there; where none is, the oldest: it was restored, and may be gone."""
    earlier = [each for each in order.ancestors if each.step < order.step]
    for each in earlier:
        with suppress(ManifestError, OSError):
            if read_manifest(step_path(order.folder, each.step), step=each.step).save == each.save:
                return each
    return earlier[-1] if earlier else None


def _check_lease(order: Order) -> None:
    holder = read_holder(order.folder)
    if order.lease and holder is not None and holder.token != order.lease:
        raise Fenced(f"{order.folder} has been taken over by {holder}. This process is to end")


def _leave_behind(order: Order, parent: Save | None) -> None:
    """List what this save leaves behind as abandoned, before it has its name.

    Raises:
        OSError: it could not be written.
    """
    abandoned = read_abandoned(order.folder)
    beyond = order.step - 1 if parent is None else parent.step
    steps = (name[0] for path in order.folder.iterdir() if (name := parse_name(path.name)))
    if parent not in abandoned and all(step <= beyond for step in steps):  # in nearly all cases
        return
    left = left_behind(scan(order.folder), abandoned, step=order.step, parent=parent)
    left -= {each for each in order.ancestors if each.step == order.step}  # the state was saved or restored there
    if left != abandoned:
        note_abandoned(order.folder, left)


def _is_prepared(order: Order) -> bool:
    try:
        return read_manifest(order.staging, step=order.step).save == order.save
    except (ManifestError, OSError):
        return False


def _note(order: Order, rank: int) -> Path:
    return order.staging / f"rank-{rank}.note"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    told: dict[str, Any] = json.loads(data) if data else _NO_ROOM_TO_SAY
    return told
