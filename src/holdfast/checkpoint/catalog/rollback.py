"""Go back to a checkpoint from which training went well."""

from pathlib import Path

from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.catalog.lineage import note_abandoned, read_abandoned
from holdfast.checkpoint.format.manifest import Save


def roll_back(folder: Path, *, before_step: int) -> int | None:
    """Abandon every checkpoint that is newer than the newest healthy one below a step.

    The next restore takes the healthy checkpoint. The abandoned ones stay where they are. No job may save into the
    folder meanwhile.

    Args:
        folder: of the checkpoints.
        before_step: the first step whose state may be broken.

    Returns:
        The step of the healthy checkpoint; None where there is none, and then nothing is changed.

    Raises:
        OSError: the list of abandoned checkpoints could not be written.
    """
    line = [info for info in scan(folder) if not info.abandoned and info.save]
    healthy = [
        info.step
        for info in line
        if info.marks.healthy is not None
        and info.state in ("written", "verified")
        and info.step < before_step
    ]
    if not healthy:
        return None
    newer = {Save(step=info.step, save=info.save) for info in line if info.step > max(healthy)}
    note_abandoned(folder, read_abandoned(folder) | newer)
    return max(healthy)
