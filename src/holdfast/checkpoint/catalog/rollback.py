"""Roll training back to a checkpoint from which it had made good progress."""

from pathlib import Path

from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.catalog.lineage import note_abandoned, read_abandoned
from holdfast.checkpoint.format.manifest import Save


def newest_healthy(folder: Path, *, before_step: int) -> int | None:
    """Return the newest step below `before_step` that is marked healthy; None if there is none.

    Abandoned and damaged checkpoints are ignored.

    Raises:
        NotFound: there is no such folder.
    """
    healthy = (
        info.step
        for info in scan(folder)
        if info.marks.healthy is not None
        and info.state in ("written", "verified")
        and info.step < before_step
        and not info.abandoned
    )
    return max(healthy, default=None)


def roll_back(folder: Path, *, to_step: int) -> None:
    """Abandon every checkpoint newer than `to_step`, so that the next restore skips them.

    The abandoned checkpoints stay in the folder until the retention policy deletes them. No job may
    save into the folder during this call.

    Raises:
        NotFound: there is no such folder.
        OSError: the list of abandoned checkpoints could not be written.
    """
    newer = {
        Save(step=info.step, save=info.save)
        for info in scan(folder)
        if info.save and info.step > to_step
    }
    note_abandoned(folder, read_abandoned(folder) | newer)
