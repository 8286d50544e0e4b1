"""Determine which checkpoints belong to the present line of training, and which are abandoned.

Each manifest names its parent, the checkpoint from which training continued to this one. When
training goes back to an earlier checkpoint and saves again, a branch begins. The checkpoints after
the branch's parent are then abandoned. An abandoned checkpoint is not deleted, but it is restored
only if the user names its step. The file `.holdfast-line` in the folder lists the abandoned saves.
It is written before the first save of the branch appears, so that after a crash between the two,
the parent is the newest checkpoint that is not abandoned. A checkpoint that is not listed, such as
a copy from another folder, is not abandoned.

This module needs no torch.
"""

import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, Protocol

from holdfast.checkpoint.format.manifest import DAMAGED_JSON, Save
from holdfast.core.atomic import write_atomic

LINE_NAME: Final = ".holdfast-line"
_logger = logging.getLogger("holdfast")


class Known(Protocol):
    """Provide the facts about a checkpoint on which its lineage depends.

    `save` is empty if the manifest cannot be read.
    """

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""

    @property
    def save(self) -> str:
        """Return the name of the save, which differs between two saves of one step."""

    @property
    def parent(self) -> Save | None:
        """Return the save from which training continued to this one; None if unknown."""


class Dated(Known, Protocol):
    """Provide the facts on which lineage depends where no list of abandoned saves exists."""

    @property
    def created_at_s(self) -> float | None:
        """Return the time of the save, in seconds since the Unix epoch."""


def read_abandoned(folder: Path) -> frozenset[Save]:
    """Return the saves in the list of abandoned saves; none if the list cannot be read."""
    try:
        content = json.loads((folder / LINE_NAME).read_bytes())
        return frozenset(
            Save(step=int(each["step"]), save=str(each["save"])) for each in content["abandoned"]
        )
    except FileNotFoundError:
        pass
    except (OSError, *DAMAGED_JSON) as error:
        _logger.warning(
            "The abandoned steps of %s cannot be read (%s: %s).", folder, LINE_NAME, error
        )
    return frozenset()


def note_abandoned(folder: Path, abandoned: Collection[Save]) -> None:
    """Replace the list of abandoned saves by `abandoned`.

    Raises:
        OSError: the list could not be written.
    """
    saves = [
        {"step": each.step, "save": each.save}
        for each in sorted(abandoned, key=lambda each: each.step)
    ]
    write_atomic(folder / LINE_NAME, json.dumps({"abandoned": saves}).encode() + b"\n")


def is_abandoned(one: Known, abandoned: Collection[Save]) -> bool:
    """Return True if a checkpoint is in the list `abandoned`.

    If its manifest cannot be read, only the step is compared.
    """
    if one.save:
        return Save(step=one.step, save=one.save) in abandoned
    return any(each.step == one.step for each in abandoned)


def left_behind(
    present: Iterable[Known], abandoned: Collection[Save], *, step: int, parent: Save | None
) -> frozenset[Save]:
    """Return the saves that are abandoned once a new save of `step` is committed.

    The new save continues from `parent`. The parent and its ancestors are not abandoned. All other
    saves with steps above the oldest known of them are abandoned. If there is no parent, the origin
    of the state is unknown. Then all saves above `step` are abandoned, but lower steps are not,
    since training may have come from them. A former save of `step` itself is not abandoned, because
    the new save replaces it, and until then it must be the newest after a crash.
    """
    by_save = {Save(step=one.step, save=one.save): one for one in present}
    line: set[Save] = set()
    beyond = step
    while parent is not None and parent not in line:
        beyond = parent.step
        if parent not in by_save:  # the parent was deleted since
            break
        line.add(parent)
        parent = by_save[parent].parent
        if parent is None:
            beyond -= 1
    return frozenset(
        save for save in by_save if save not in line and (save in abandoned or save.step > beyond)
    )


def left_by_newest(present: Iterable[Dated]) -> frozenset[Save]:
    """Return the saves that must be abandoned, given the most recently made checkpoint.

    This function is for object storage, which has no list of abandoned saves. A save is abandoned
    if it was made earlier than the most recent one, and if the most recent one continues from a
    lower step. The saves from which the most recent one continues are not abandoned, and neither
    are those that continue from it.
    """
    found = [one for one in present if one.save and one.created_at_s is not None]
    newest = max(found, key=lambda one: one.created_at_s or 0.0, default=None)
    if newest is None or newest.parent is None:
        return frozenset()
    earlier = [one for one in found if one.created_at_s != newest.created_at_s]
    later = {Save(step=newest.step, save=newest.save)}
    for one in sorted(earlier, key=lambda one: one.step):
        if one.parent in later:
            later.add(Save(step=one.step, save=one.save))
    return left_behind(earlier, (), step=newest.step, parent=newest.parent) - later
