"""Describe an exception of foreign code in one sentence with its place."""

import traceback
from pathlib import Path

from holdfast.core.errors import HoldfastError


def sentence(error: BaseException) -> str:
    """Describe for the user an exception that ended a task.

    The message of a Holdfast exception is already a sentence. For any other exception, the sentence
    names its type, its message and the innermost line of code.
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
