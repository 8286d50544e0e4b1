"""Up to which step the checkpoints of a folder are in storage: `.holdfast-pushed`, in that folder.

It tells what was taken away from the folder, and is not to come back, from what was never there. Needs no torch.
"""

import json
import logging
from pathlib import Path

from holdfast.checkpoint.manifest import DAMAGED_JSON
from holdfast.core.atomic import write_atomic

PUSHED_NAME = ".holdfast-pushed"
_logger = logging.getLogger("holdfast")


def pushed_up_to(folder: Path, url: str) -> int:
    """The highest step that was pushed from `folder` to `url`; -1 where none was, or nobody can tell."""
    return _read(folder).get(url, -1)


def note_pushed(folder: Path, url: str, step: int) -> None:
    """Note that `step` was pushed from `folder` to `url`.

    Raises:
        OSError: it could not be written.
    """
    highest = _read(folder)
    if highest.get(url, -1) < step:
        write_atomic(folder / PUSHED_NAME, json.dumps(highest | {url: step}).encode() + b"\n")


def _read(folder: Path) -> dict[str, int]:
    try:
        return {str(url): int(step) for url, step in json.loads((folder / PUSHED_NAME).read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED_JSON) as error:
        _logger.warning("What was pushed from %s is not known (%s is unreadable: %s).", folder, PUSHED_NAME, error)
        return {}
