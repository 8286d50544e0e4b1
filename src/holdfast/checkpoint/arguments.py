"""Arguments of the user's, checked before any work: the message names the argument, its value and what is allowed."""

import tempfile
from pathlib import Path
from typing import Any

from holdfast.checkpoint.limits import advice_on, in_words
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.whole import whole_number


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Check for one of a few words.

    Raises:
        BadUse: it is none of them.
    """
    if value not in allowed:
        raise BadUse(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed[:-1]))} and {allowed[-1]!r}.")


def check_above_zero(name: str, value: Any) -> None:
    """Check for a number above 0.

    Raises:
        BadUse: it is none.
    """
    if not isinstance(value, int | float) or not value > 0:
        raise BadUse(f"{name} is {value!r}; allowed is a number above 0.")


def check_from_zero(name: str, value: Any) -> None:
    """Check for a number from 0 on.

    Raises:
        BadUse: it is none.
    """
    if not isinstance(value, int | float) or not value >= 0:
        raise BadUse(f"{name} is {value!r}; allowed is a number from 0 on.")


def check_whole(name: str, value: Any, *, least: int) -> int:
    """Check for a whole number from `least` on, and return it as an int.

    Raises:
        BadUse: it is none.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise BadUse(f"{name} is {value!r}; allowed is a whole number from {least} on.")
    return number


def make_writable(folder: Path) -> None:
    """Make a folder if need be, and see that it can be written.

    Raises:
        BadUse: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # mode bits do not tell of a read-only mount, nor stop root
    except (FileExistsError, NotADirectoryError) as error:
        raise BadUse(f"{error.filename} is a file. Give Checkpointer a folder.") from error
    except OSError as error:
        advice = advice_on(error) or (
            "Make it writable, or give Checkpointer another one, or read_only=True where it only restores."
        )
        reason = in_words(error) if advice_on(error) else error.strerror or error
        raise BadUse(f"The checkpoint folder {folder} cannot be written ({reason}). {advice}") from error


def check_there(folder: Path) -> None:
    """See that a folder is there.

    Raises:
        NotFound: it is not.
    """
    if not folder.is_dir():
        raise NotFound(f"There is no checkpoint folder {folder}. Give Checkpointer the one that a run has saved into.")
