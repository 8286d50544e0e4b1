"""Move the checkpoints of other runs into a subfolder, without deleting any."""

import logging
import re
from pathlib import Path
from typing import Final

from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.catalog.lineage import LINE_NAME
from holdfast.checkpoint.catalog.writer_lease import WRITER_NAME, Identity, has_steps, read_holder
from holdfast.checkpoint.format.paths import parse_name
from holdfast.core.atomic import fsync_folder

_NAME: Final = re.compile(r"\.?aside-(\d+)(\.tmp)?")
_UNFINISHED: Final = ".aside-*.tmp"
_logger = logging.getLogger("holdfast")


def is_own(folder: Path, who: Identity) -> bool:
    """Return True if the last writer, or the newest checkpoint not abandoned, is of this run."""
    if not who.run:
        return False
    holder = read_holder(folder)
    if holder is not None and holder.run == who.run:
        return True
    if any(folder.glob(_UNFINISHED)):  # the newest checkpoint may be set aside already
        return False
    return next((info.run for info in scan(folder) if not info.abandoned), "") == who.run


def is_of_others(folder: Path, who: Identity) -> bool:
    """Return True if a fresh run must move the folder's checkpoints away.

    This is so if the folder has checkpoints, and these are not of this run.
    """
    return (has_steps(folder) or any(folder.glob(_UNFINISHED))) and not is_own(folder, who)


def set_aside(folder: Path) -> Path:
    """Move all checkpoints of a folder, and their records, into its subfolder `aside-N`.

    The list of checkpoints pushed to storage stays in the folder, so that none of them is fetched
    from storage again. Each checkpoint is moved by one rename. The subfolder is named `aside-N`
    only when all checkpoints are in it. After a crash, the next call finishes the move.

    Returns:
        The path of `aside-N`.

    Raises:
        OSError: a checkpoint could not be moved.
    """
    numbers = {
        int(match[1]): match[2] is not None
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    }
    unfinished = [number for number, is_unfinished in numbers.items() if is_unfinished]
    number = unfinished[0] if unfinished else max(numbers, default=0) + 1
    hidden, final = folder / f".aside-{number}.tmp", folder / f"aside-{number}"
    hidden.mkdir(exist_ok=True)
    # Move the records last. Until then, abandoned checkpoints are still listed as abandoned, and
    # the folder still belongs to their run.
    names = [path.name for path in folder.iterdir() if parse_name(path.name) is not None]
    for name in (*names, LINE_NAME, WRITER_NAME):
        if (folder / name).exists() or (folder / name).is_symlink():
            (folder / name).rename(hidden / name)
    fsync_folder(hidden)
    hidden.rename(final)
    fsync_folder(folder)
    _logger.warning(
        "The checkpoints of %s are set aside in %s; delete them there once they are no longer needed.",
        folder,
        final,
    )
    return final
