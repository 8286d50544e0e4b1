"""Check users' arguments before any work.

Each message names the argument, its value and the allowed values.
"""

import os
import re
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.core.whole import whole_number

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
"""Match one slash as well, because `Path` turns two slashes into one."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Check that a value is one of the allowed words.

    Raises:
        BadUse: the value is anything else.
    """
    if value not in allowed:
        raise BadUse(
            f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed[:-1]))} and {allowed[-1]!r}."
        )


def check_above_zero(name: str, value: Any) -> None:
    """Check that a value is a number above 0.

    Raises:
        BadUse: the value is anything else.
    """
    if not isinstance(value, int | float) or not value > 0:
        raise BadUse(f"{name} is {value!r}; allowed is a number above 0.")


def check_from_zero(name: str, value: Any) -> None:
    """Check that a value is a number, and not below 0.

    Raises:
        BadUse: the value is anything else.
    """
    if not isinstance(value, int | float) or not value >= 0:
        raise BadUse(f"{name} is {value!r}; allowed is a number from 0 on.")


def check_limits(**limits: Any) -> None:
    """Check that each limit is None or a number above 0.

    Raises:
        BadUse: a limit is anything else.
    """
    for name, limit in limits.items():
        if limit is not None:
            check_above_zero(name, limit)


def check_whole(name: str, value: Any, *, least: int) -> int:
    """Check that a value is a whole number and at least `least`; return the number as an int.

    Raises:
        BadUse: the value is anything else.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise BadUse(f"{name} is {value!r}; allowed is a whole number from {least} on.")
    return number


def local_path(given: Any, *, instead_of_url: str) -> Path:
    """Convert a path that a user gave to an absolute path.

    `~` and environment variables in the path are expanded.

    Args:
        given: the path.
        instead_of_url: the end of the error message if `given` is a URL; `{url}` in this text
            stands for the URL.

    Raises:
        BadUse: `given` is empty, is a URL or no path at all, or names a variable or user that does
            not exist.
    """
    if not isinstance(given, str | bytes | os.PathLike):
        raise BadUse(f"The path is {given!r}. Give a str or a pathlib.Path.")
    path = os.fsdecode(given)
    if not path.strip():
        raise BadUse("The path is empty. Give one, or `.` for the working directory.")

    def value(name: re.Match[str]) -> str:
        found = os.environ.get(name[1] or name[2] or "", "")
        if not found:
            raise BadUse(
                f"{path} names the variable {name[0]}, which is not set. Set it, or give the path itself."
            )
        return found

    if not os.path.lexists(path):  # the name of an existing folder may contain `$`
        path = _VARIABLE.sub(value, path)
    if url := _URL.match(path):
        if url[1].lower() == "file":
            raise BadUse(f"{path} is a URL. Give the plain path: /{path[url.end() :].lstrip('/')}")
        raise BadUse(
            f"{path} is a URL. {instead_of_url.format(url=url[1] + '://' + path[url.end() :])}"
        )
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise BadUse(
            f"{path} names a user without a home folder here. Give the path itself, or ./{path}"
        ) from error
