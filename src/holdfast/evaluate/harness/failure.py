"""Describe an error of foreign code in one sentence, with its place."""

import traceback
from pathlib import Path

from holdfast.core.errors import HoldfastError


def sentence(error: BaseException) -> str:
    """Describe an error that ended a task, for the user.

    Holdfast's own errors are sentences already. For others, the sentence has type, message and the
    innermost place.
    """
    if isinstance(error, HoldfastError):
        return str(error)
    message = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {message[:500]}{where}"
