"""Why a save is not durable, what is left, and what to do, in words."""

import errno
import shutil

from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.writer.commit import FULL
from holdfast.core.errors import HoldfastError
from holdfast.core.system_limits import advice_on, in_words


def explain(order: SaveRequest, needed_bytes: int, error: Exception) -> str:
    """One failed save; called once its remains are gone.

    Args:
        order: the save.
        needed_bytes: what this rank had to write.
        error: what happened.
    """
    folder = order.folder
    if getattr(error, "is_final", False) and not getattr(
        error, "advice", ""
    ):  # storage is not the reason
        return f"Step {order.step} was not saved: {error}."
    try:
        good = next(
            (info for info in scan(folder) if info.state == "written" and not info.abandoned), None
        )
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, HoldfastError) as gone:
        if advice := advice_on(error) or advice_on(gone):
            return f"Step {order.step} was not saved: {in_words(error)}. {advice}"
        return f"Step {order.step} was not saved: {error}; {gone} Mount or make the folder again."
    code = getattr(error, "errno", None)
    if code in FULL:
        reason = (
            f"{folder} is full: about {needed_bytes:,} bytes are needed and {free_bytes:,} are free"
        )
        advice = "Free space there, keep fewer checkpoints, or give Checkpointer another folder."
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = f"{folder} cannot be written ({error})"
        advice = "Make it writable, or give Checkpointer another folder."
    elif advice := advice_on(error):
        reason = in_words(error)
    else:
        reason = f"{error} (in {folder})"
        advice = getattr(error, "advice", "") or "Look at that folder's storage and save again."
    last = (
        "There is no earlier checkpoint."
        if good is None
        else f"The last good step is {good.step} ({good.path})."
    )
    return f"Step {order.step} was not saved: {reason}. {last} {advice}"
