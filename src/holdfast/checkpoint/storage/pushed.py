"""Which checkpoints of a folder were pushed to storage, or begun to be: `.holdfast-pushed`, in that folder.

It tells what was taken away from the folder, and is not to come back, from what was never there. Needs no torch.
"""

import json
import logging
from pathlib import Path
from typing import Final

from holdfast.checkpoint.format.manifest import DAMAGED_JSON
from holdfast.core.atomic import write_atomic

PUSHED_NAME = ".holdfast-pushed"
_MOST_NAMES: Final = 10_000
"""Of each storage, those of the highest steps: whoever goes back over more of them meets others again."""
_logger = logging.getLogger("holdfast")


def pushed_names(folder: Path, url: str) -> list[str]:
    """The names, in storage, of what was pushed from `folder` to `url`; none where nobody can tell."""
    try:
        return _parse(folder).get(url, [])
    except (OSError, *DAMAGED_JSON) as error:
        _logger.warning(
            "What was pushed from %s is not known (%s is unreadable: %s).",
            folder,
            PUSHED_NAME,
            error,
        )
        return []


def note_pushed(folder: Path, url: str, name: str) -> None:
    """Note that what is called `name` in storage is from `folder`, and pushed to `url`.

    Raises:
        OSError: it could not be read or written.
    """
    try:
        pushed = _parse(folder)
    except DAMAGED_JSON as error:
        _logger.warning(
            "What was pushed from %s is noted anew: %s is damaged (%s).", folder, PUSHED_NAME, error
        )
        pushed = {}
    names = pushed.get(url, [])
    if name not in names:
        pushed[url] = sorted([*names, name])[-_MOST_NAMES:]
        write_atomic(folder / PUSHED_NAME, json.dumps(pushed).encode() + b"\n")


def _parse(folder: Path) -> dict[str, list[str]]:
    try:
        content = json.loads((folder / PUSHED_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return {str(url): [str(name) for name in names] for url, names in content.items()}
