"""Which checkpoints a folder holds, and whether each is whole. Needs no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.checkpoint.folders import parse_name
from holdfast.checkpoint.manifest import ManifestError, check_contents, check_sizes, read_manifest
from holdfast.core.errors import NotFound

State = Literal["written", "verified", "incomplete", "damaged"]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint of a folder.

    `state`: `written` (manifest and sizes are right), `verified` (every byte too), `incomplete` (no
    manifest), `damaged`; of the last two `reason` says why. `created_at_s` is in seconds since the Unix
    epoch, None where the manifest cannot tell.
    """

    step: int
    path: Path
    state: State
    size_bytes: int = 0
    created_at_s: float | None = None
    reason: str | None = None


def scan(folder: str | Path) -> list[CheckpointInfo]:
    """List the checkpoints of `folder`, newest first, by manifest and file sizes; reads no content.

    Saves in progress and links are left out. A `.replaced` folder, which a crash while a step was saved again
    can leave, comes after the one of the proper name.

    Raises:
        NotFound: `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotFound(f"There is no checkpoint folder {folder}. Give the one that Checkpointer was given.")
    found = [
        (*name, path)
        for path in folder.iterdir()
        if (name := parse_name(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    found.sort(key=lambda item: (item[0], not item[1]), reverse=True)
    return [inspect(path) for _step, _replaced, path in found]


def inspect(path: Path) -> CheckpointInfo:
    """Look at one checkpoint: its manifest and the sizes of its files.

    Raises:
        NotFound: `path` is no folder of the name `step-NUMBER`.
    """
    name = parse_name(path.name)
    if name is None or not path.is_dir():
        raise NotFound(f"{path} is not a checkpoint. Give a folder of the name step-NUMBER.")
    step = name[0]
    try:
        manifest = read_manifest(path, step=step)
        check_sizes(path, manifest.files)
    except FileNotFoundError:
        reason = "there is no manifest: the save did not finish, or the file was removed"
        return CheckpointInfo(step=step, path=path, state="incomplete", reason=reason)
    except ManifestError as error:
        return CheckpointInfo(step=step, path=path, state="damaged", reason=str(error))
    return CheckpointInfo(
        step=step,
        path=path,
        state="written",
        size_bytes=manifest.size_bytes,
        created_at_s=manifest.created_at_s,
    )


def verify(checkpoint: CheckpointInfo | str | Path) -> CheckpointInfo:
    """Read a whole checkpoint and say whether it is `verified` or `damaged`, and which file is wrong.

    Raises:
        NotFound: it is not there.
    """
    path = checkpoint.path if isinstance(checkpoint, CheckpointInfo) else Path(checkpoint)
    info = inspect(path)
    if info.state != "written":
        return replace(info, state="damaged")
    try:
        check_contents(path, read_manifest(path, step=info.step).files)
    except (ManifestError, OSError) as error:
        return replace(info, state="damaged", reason=str(error))
    return replace(info, state="verified")
