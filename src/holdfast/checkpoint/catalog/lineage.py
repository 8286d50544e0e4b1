"""Record which checkpoints training has continued from, and which it has abandoned.

Each manifest names its parent: the checkpoint that the state descends from. When training goes back
and saves again, a branch begins, and the checkpoints beyond the parent are abandoned. An abandoned
checkpoint stays, and is restored only if the user names it. The list of abandoned saves is
`.holdfast-line` in the folder. The list is written before the first save of the branch gets its
name: a crash between the two leaves the parent as the newest checkpoint. A checkpoint in no list,
such as a copy from elsewhere, is not abandoned.

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
    """The facts of a checkpoint that the lineage depends on.

    `save` is empty if the manifest cannot be read.
    """

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""

    @property
    def save(self) -> str:
        """Return the name of the save."""

    @property
    def parent(self) -> Save | None:
        """Return the checkpoint that this one descends from; None if unknown."""


class Dated(Known, Protocol):
    """The facts that the lineage depends on if no list records the checkpoint."""

    @property
    def created_at_s(self) -> float | None:
        """Return the time of the save, in seconds since the Unix epoch."""


def read_abandoned(folder: Path) -> frozenset[Save]:
    """Return the saves that are listed as abandoned; none if the list cannot be read."""
    try:
        content = json.loads((folder / LINE_NAME).read_bytes())
        return frozenset(
            Save(step=int(each["step"]), save=str(each["save"])) for each in content["abandoned"]
        )
    except FileNotFoundError:
        pass
    except (OSError, *DAMAGED_JSON) as error:
        _logger.warning(
            "Which steps of %s are abandoned is not known (%s: %s).", folder, LINE_NAME, error
        )
    return frozenset()


def note_abandoned(folder: Path, abandoned: Collection[Save]) -> None:
    """Replace the list of abandoned saves.

    Raises:
        OSError: the list could not be written.
    """
    saves = [
        {"step": each.step, "save": each.save}
        for each in sorted(abandoned, key=lambda each: each.step)
    ]
    write_atomic(folder / LINE_NAME, json.dumps({"abandoned": saves}).encode() + b"\n")


def is_abandoned(one: Known, abandoned: Collection[Save]) -> bool:
    """Return whether a checkpoint is listed; without a readable manifest, compare only the step."""
    if one.save:
        return Save(step=one.step, save=one.save) in abandoned
    return any(each.step == one.step for each in abandoned)


def left_behind(
    present: Iterable[Known], abandoned: Collection[Save], *, step: int, parent: Save | None
) -> frozenset[Save]:
    """Return the saves that are abandoned once a save of `step` from `parent` has its name.

    The parent and its ancestors are not abandoned. All saves beyond the oldest known one of them
    are abandoned. Without a parent, all saves beyond `step` are abandoned: the origin of the state
    is unknown, and lower steps may be of its line. The new save replaces the former save of `step`:
    until then, a crash leaves the former save the newest.
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
    """Return the saves that the last-made checkpoint shows to be abandoned.

    This function is for storage, which has no list of abandoned saves. The last-made checkpoint
    descends from a step below the abandoned saves. The abandoned saves were made before the
    last-made checkpoint. A save that descends from the last-made checkpoint is not abandoned.
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
