"""Which checkpoints a folder holds, and whether each is whole. Needs no torch."""

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
"""`progress(bytes done, bytes in all)`."""
_METADATA_NAME = ".metadata"  # as in `metadata`, which needs torch
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint of a folder.

    `state`: `written` (manifest and sizes are right), `verified` (every byte too), `incomplete` (no
    manifest), `damaged`; of the last two `reason` says why, and `unread` that it could not be read, which may pass.
    `created_at_s` is in seconds since the Unix epoch, None where the manifest cannot tell. `marks`: what became known
    of it later; `state` does not depend on it. `save`, `run`, `parent`: see `Manifest`; empty where that is unreadable.
    `abandoned`: training has gone back and on from an earlier step, see `lineage`.
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
    """List the checkpoints of `folder`, newest first, by manifest and file sizes; reads no content.

    Saves in progress are left out. A link to a checkpoint is one; a link to nothing is damaged. A `.replaced` folder,
    which a crash while a step was saved again can leave, comes after the one of the proper name.

    Raises:
        NotFound: `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotFound(
            f"There is no checkpoint folder {folder}. Give the one that Checkpointer was given."
        )
    found = [
        (*name, path)
        for path in folder.iterdir()
        if (name := parse_name(path.name)) and _is_candidate(path)
    ]
    found.sort(key=lambda item: (item[0], not item[1]), reverse=True)
    checkpoints = []
    for _step, _replaced, path in found:
        with contextlib.suppress(NotFound):  # deleted since
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
    """Whether it is one, or nobody can tell just now: whoever reads it hears why."""
    try:
        return path.is_dir()
    except OSError:
        return True


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Look at one checkpoint: its manifest and the sizes of its files.

    Raises:
        NotFound: `path` is no folder of the name `step-NUMBER`, and has no manifest either.
    """
    step = checkpoint_step(path)
    if step is None or not is_folder(path):
        if step is not None and (target := _target(path)) is not None:
            # Unread: the storage that it leads to may come back.
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
    except OSError:  # it is no link, or gone
        return None


def checkpoints_at(path: Path) -> list[Path]:
    """`path` itself where it is a checkpoint; else those that it holds: Holdfast's, newest first, then any others."""
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
    """Whether a checkpoint has DCP's metadata and no manifest: DCP alone wrote it, or the manifest was lost."""
    return _has(path, _METADATA_NAME) and not _has(path, MANIFEST_NAME)


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint by its folder's name; for a copy of another name, by its manifest; else None."""
    name = parse_name(path.name)
    if name is not None:
        return name[0]
    try:
        return int(json.loads((path / MANIFEST_NAME).read_bytes())["step"])
    except OSError:
        return None
    except DAMAGED_JSON:
        return 0  # it is damaged, which `read_manifest` finds whatever step it is compared with


def verify(
    checkpoint: CheckpointInfo | str | Path, *, progress: Progress = lambda _done, _total: None
) -> CheckpointInfo:
    """Read a whole checkpoint and say whether it is `verified`, `damaged` or `incomplete`, and which file is wrong.

    Where its step is saved again meanwhile, that is read in its stead. The files are compared with what was written.
    Whether that was the state when `save` was called cannot be read from files: a save attests it (`attest`).

    Raises:
        NotFound: it is not there, or is deleted meanwhile.
    """
    return _verify_one_save(
        checkpoint.path if isinstance(checkpoint, CheckpointInfo) else Path(checkpoint), progress
    )[0]


def _verify_one_save(path: Path, progress: Progress) -> tuple[CheckpointInfo, bytes | None]:
    """What was found, and the manifest of the save of which it is true."""
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
    """As `verify`, and keep what was found in the checkpoint's marks; where that cannot be, it is logged.

    One without a manifest gets no mark: it may be a copy that is still arriving. Nor does one that could not be read.

    Raises:
        NotFound: it is not there.
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
    except (OSError, HoldfastError) as error:  # it was verified all the same
        _logger.warning("That %s is %s could not be noted there: %s", info.path, info.state, error)
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
    except OSError:  # nobody can tell
        return False
