"""Setting aside what other runs have saved into a folder: moved into a folder of its own there, never deleted."""

import logging
import re
from pathlib import Path
from typing import Final

from holdfast.checkpoint.catalog import scan
from holdfast.checkpoint.folders import parse_name
from holdfast.checkpoint.lease import WRITER_NAME, Identity, has_steps, read_holder
from holdfast.checkpoint.lineage import LINE_NAME
from holdfast.core.atomic import fsync_folder

_NAME: Final = re.compile(r"\.?aside-(\d+)(\.tmp)?")
_UNFINISHED: Final = ".aside-*.tmp"
_logger = logging.getLogger("holdfast")


def is_own(folder: Path, who: Identity) -> bool:
    """Return whether the last writer of a folder, or the newest checkpoint of its line, is of this run."""
    if not who.run:
        return False
    holder = read_holder(folder)
    if holder is not None and holder.run == who.run:
        return True
    if any(folder.glob(_UNFINISHED)):  # the newest may be set aside already
        return False
    return next((info.run for info in scan(folder) if not info.abandoned), "") == who.run


def is_of_others(folder: Path, who: Identity) -> bool:
    """Return whether a folder has checkpoints that a fresh run of this identity sets aside: all but its own."""
    return (has_steps(folder) or any(folder.glob(_UNFINISHED))) and not is_own(folder, who)


def set_aside(folder: Path) -> Path:
    """Move all checkpoints of a folder, and what is known of them, into `aside-N` there; return that.

    The list of what was pushed to storage stays in the folder, so that nothing of it is fetched from there. Each
    checkpoint moves in one step, and the new folder gets its name once all are in it. After a crash the next call
    finishes.

    Raises:
        OSError: one could not be moved.
    """
    numbers = {
        int(match[1]): match[2] is not None for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    }
    unfinished = [number for number, is_unfinished in numbers.items() if is_unfinished]
    number = unfinished[0] if unfinished else max(numbers, default=0) + 1
    hidden, final = folder / f".aside-{number}.tmp", folder / f"aside-{number}"
    hidden.mkdir(exist_ok=True)
    # What is known of them goes last: until then they are abandoned steps of that run, as before.
    names = [path.name for path in folder.iterdir() if parse_name(path.name) is not None]
    for name in (*names, LINE_NAME, WRITER_NAME):
        if (folder / name).exists() or (folder / name).is_symlink():
            (folder / name).rename(hidden / name)
    fsync_folder(hidden)
    hidden.rename(final)
    fsync_folder(folder)
    _logger.warning(
        "The checkpoints of %s are set aside in %s; delete them there once nobody needs them.", folder, final
    )
    return final
