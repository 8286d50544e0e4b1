"""List the checkpoints of a folder, and check whether each is complete and undamaged.

This module needs no torch.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from holdfast.checkpoint.catalog.annotations import (
    Annotations,
    note_damaged,
    note_verified,
    read_marks,
)
from holdfast.checkpoint.catalog.lineage import is_abandoned, read_abandoned
from holdfast.checkpoint.format.manifest import (
    DAMAGED_JSON,
    MANIFEST_NAME,
    ManifestError,
    Save,
    UnreadError,
    check_file_contents,
    check_sizes,
    read_manifest,
)
from holdfast.checkpoint.format.paths import parse_name
from holdfast.core.errors import HoldfastError, NotFound

State = Literal["written", "verified", "incomplete", "damaged"]
Progress = Callable[[int, int], None]
"""A function `progress(done_bytes, total_bytes)`."""
_METADATA_NAME = ".metadata"  # repeated from `format.dcp_metadata`, which imports torch
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Describe one checkpoint of a folder.

    Attributes:
        step: the training step.
        path: the folder of the checkpoint.
        state: `written` if the manifest and all sizes are right; `verified` if every byte was read
            and is right, too; `incomplete` if there is no manifest; else `damaged`.
        size_bytes: the size of all files; 0 if the manifest is unreadable.
        created_at_s: the time of the save, in seconds since the Unix epoch; None if unknown.
        reason: the reason why the checkpoint is incomplete or damaged.
        unread: whether a file could not be read, which may be temporary.
        save, run, parent: see `Manifest`; empty if the manifest is unreadable.
        abandoned: whether training has continued from an earlier step instead, see `lineage`.
        marks: the annotations of the checkpoint; `state` does not depend on them.
    """

    step: int
    path: Path
    state: State
    size_bytes: int = 0
    created_at_s: float | None = None
    reason: str | None = None
    unread: bool = False
    save: str = ""
    run: str = ""
    parent: Save | None = None
    abandoned: bool = False
    marks: Annotations = field(default_factory=Annotations, hash=False)


def scan(folder: str | Path) -> list[CheckpointInfo]:
    """List the checkpoints of `folder`, newest first.

    The state of each is determined by its manifest and its file sizes; no other content is read.
    Saves in progress are left out. A symbolic link to a checkpoint is listed as a checkpoint, and a
    broken link as a damaged one. If a crash interrupted a second save of a step, a `.replaced`
    folder with the first save remains. It is listed after the proper folder of the step.

    Raises:
        NotFound: `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotFound(
            f"There is no checkpoint folder {folder}. Give the folder that was passed to Checkpointer."
        )
    found = [
        (*name, path)
        for path in folder.iterdir()
        if (name := parse_name(path.name)) and _is_candidate(path)
    ]
    found.sort(key=lambda item: (item[0], not item[1]), reverse=True)
    checkpoints = []
    for _step, _replaced, path in found:
        with contextlib.suppress(NotFound):  # deleted since the listing
            checkpoints.append(inspect_checkpoint(path))
    abandoned = read_abandoned(folder)
    return [
        replace(info, abandoned=is_abandoned(info, abandoned))
        for info in checkpoints
        if info.state == "written" or _is_candidate(info.path)
    ]


def _is_candidate(path: Path) -> bool:
    return is_folder(path) or path.is_symlink()


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder, or if this cannot be determined now.

    A later read of the path then reports the error.
    """
    try:
        return path.is_dir()
    except OSError:
        return True


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Describe one checkpoint by its manifest and the sizes of its files.

    Raises:
        NotFound: `path` is not a checkpoint, by its name `step-NUMBER` or by a manifest.
    """
    while True:
        folder = _folder_id(path)
        info = _inspect(path)
        now = _folder_id(path)
        # If the step is saved again meanwhile, its marks and its manifest may be of two saves. A
        # whole checkpoint whose folder has just been renamed was of one save.
        if now == folder or (now is None and info.state == "written"):
            return info


def _folder_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # `_inspect` reports the error
        return None
    return found.st_dev, found.st_ino


def _inspect(path: Path) -> CheckpointInfo:
    step = checkpoint_step(path)
    if step is None or not is_folder(path):
        if step is not None and (target := _target(path)) is not None:
            # The damage is not final, since the storage behind the link may come back.
            reason = f"it is a link to {target}, where there is no folder"
            return CheckpointInfo(step=step, path=path, state="damaged", reason=reason, unread=True)
        raise NotFound(f"{path} is not a checkpoint. Give a folder of the name step-NUMBER.")
    info = CheckpointInfo(step=step, path=path, state="written", marks=read_marks(path))
    try:
        manifest = read_manifest(path, step=step)
        info = replace(info, save=manifest.save, run=manifest.run, parent=manifest.parent)
        check_sizes(path, manifest.files)
    except FileNotFoundError:
        reason = "there is no manifest: the save did not finish, or the file was removed"
        return replace(info, state="incomplete", reason=reason)
    except ManifestError as error:
        return replace(
            info, state="damaged", reason=str(error), unread=isinstance(error, UnreadError)
        )
    return replace(info, size_bytes=manifest.size_bytes, created_at_s=manifest.created_at_s)


def _target(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:  # not a link, or deleted meanwhile
        return None


def checkpoints_at(path: Path) -> list[Path]:
    """Return `path` itself if it is a checkpoint, else the checkpoints in the folder `path`.

    In a folder, Holdfast's checkpoints come first, with the newest at the start. Others follow in
    the order of their names.
    """
    if _is_checkpoint(path):
        return [path]
    ours = [info.path for info in scan(path)]
    others = (
        child
        for child in sorted(path.iterdir())
        if not child.name.startswith(".") and not child.is_symlink()
    )
    return [*ours, *(child for child in others if child not in ours and _is_checkpoint(child))]


def has_only_metadata(path: Path) -> bool:
    """Return True if a checkpoint has DCP's metadata but no manifest.

    Either DCP wrote the checkpoint without Holdfast, or the manifest was lost.
    """
    return _has(path, _METADATA_NAME) and not _has(path, MANIFEST_NAME)


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint, from its folder's name or its manifest; None if unknown."""
    name = parse_name(path.name)
    if name is not None:
        return name[0]
    try:
        return int(json.loads((path / MANIFEST_NAME).read_bytes())["step"])
    except OSError:
        return None
    except DAMAGED_JSON:
        return 0  # any number will do: `read_manifest` rejects the damaged manifest


def verify(
    checkpoint: CheckpointInfo | str | Path, *, progress: Progress = lambda _done, _total: None
) -> CheckpointInfo:
    """Read a whole checkpoint, and return its state: `verified`, `damaged` or `incomplete`.

    If the step is saved again during the verification, the new save is read, too. This function
    checks that the files still have the bytes that were written. It cannot check that these bytes
    were the state at the call of `save`, but a save with `attest` checks this.

    Args:
        checkpoint: the checkpoint, or its folder.
        progress: called with the number of bytes read so far and the total.

    Returns:
        The description of the checkpoint with its new state. If a file is wrong, `reason` names it.

    Raises:
        NotFound: the checkpoint does not exist, or is deleted during the verification.
    """
    return _verify_one_save(
        checkpoint.path if isinstance(checkpoint, CheckpointInfo) else Path(checkpoint), progress
    )[0]


def _verify_one_save(path: Path, progress: Progress) -> tuple[CheckpointInfo, bytes | None]:
    """Verify a checkpoint; return its description and the bytes of the manifest that was checked."""
    while True:
        read = _manifest(path)
        info = _verify(path, progress)
        if not path.is_dir() and not path.is_symlink():
            raise NotFound(f"{path} was deleted while it was verified. Take one that is listed.")
        if _manifest(path) == read:
            return info, read


def _manifest(path: Path) -> bytes | None:
    try:
        return (path / MANIFEST_NAME).read_bytes()
    except OSError:
        return None


def _verify(path: Path, progress: Progress) -> CheckpointInfo:
    info = inspect_checkpoint(path)
    if info.state != "written":
        return info
    done_bytes = 0
    one_at_a_time = threading.Lock()

    def read(count: int) -> None:
        nonlocal done_bytes
        with one_at_a_time:
            done_bytes += count
            progress(done_bytes, info.size_bytes)

    try:
        check_file_contents(path, read_manifest(path, step=info.step).files, read)
    except ManifestError as error:
        return replace(
            info, state="damaged", reason=str(error), unread=isinstance(error, UnreadError)
        )
    except OSError as error:
        return replace(info, state="damaged", reason=str(error), unread=True)
    return replace(info, state="verified")


def verify_and_note(
    checkpoint: CheckpointInfo,
    *,
    by: str,
    now_s: float,
    progress: Progress = lambda _done, _total: None,
) -> CheckpointInfo:
    """Verify a checkpoint, and record the result in its marks.

    If the result cannot be recorded, this is logged. No mark is set on a checkpoint without a
    manifest, since it may be a copy in progress, or on a checkpoint that could not be read.

    Raises:
        NotFound: the checkpoint does not exist.
    """
    info, read = _verify_one_save(checkpoint.path, progress)
    if checkpoint.state == "incomplete" or info.unread:
        return info

    def is_still_that() -> bool:
        return _manifest(info.path) == read

    try:
        if info.state == "verified":
            marks = note_verified(info.path, by=by, now_s=now_s, still=is_still_that)
        else:
            marks = note_damaged(
                info.path, info.reason or info.state, by=by, now_s=now_s, still=is_still_that
            )
    except (OSError, HoldfastError) as error:  # the verdict is valid, although it is not recorded
        _logger.warning(
            "The verdict on %s (%s) could not be recorded there: %s", info.path, info.state, error
        )
        return info
    return replace(info, marks=marks)


def _is_checkpoint(path: Path) -> bool:
    return is_folder(path) and (
        parse_name(path.name) is not None
        or any(_has(path, name) for name in (MANIFEST_NAME, _METADATA_NAME))
    )


def _has(path: Path, name: str) -> bool:
    try:
        return (path / name).is_file()
    except OSError:  # unknown, which counts as absent
        return False
