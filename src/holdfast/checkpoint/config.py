"""Arguments of the user's, checked before any work: the message names the argument, its value and what is allowed."""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.system_limits import advice_on, in_words
from holdfast.core.whole import whole_number

if TYPE_CHECKING:
    import torch.distributed as dist


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
"""One slash is enough: `Path` makes one of two."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Check for one of a few words.

    Raises:
        BadUse: it is none of them.
    """
    if value not in allowed:
        raise BadUse(
            f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed[:-1]))} and {allowed[-1]!r}."
        )


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


def check_limits(**limits: Any) -> None:
    """Check each limit that is not None for a number above 0.

    Raises:
        BadUse: one is none.
    """
    for name, limit in limits.items():
        if limit is not None:
            check_above_zero(name, limit)


def check_whole(name: str, value: Any, *, least: int) -> int:
    """Check for a whole number from `least` on, and return it as an int.

    Raises:
        BadUse: it is none.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise BadUse(f"{name} is {value!r}; allowed is a whole number from {least} on.")
    return number


def local_path(given: Any, *, instead_of_url: str) -> Path:
    """Return the absolute path that a user means: `~` and variables of the environment are expanded.

    Args:
        given: the path.
        instead_of_url: the end of the message where `given` is a URL; `{url}` stands for it.

    Raises:
        BadUse: it is no path, or empty, or a URL, or names a variable that is not set or a user that does not exist.
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

    if not os.path.lexists(path):  # a folder may have such a name
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


def checkpoint_folder(given: Any) -> Path:
    """Return the absolute path of the folder that a Checkpointer is given; see `local_path`."""
    return local_path(
        given, instead_of_url="Give a local folder, and push_to={url!r} to have a copy there."
    )


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
        raise BadUse(
            f"The checkpoint folder {folder} cannot be written ({reason}). {advice}"
        ) from error


def check_there(folder: Path) -> None:
    """See that a folder is there.

    Raises:
        NotFound: it is not.
    """
    if not folder.is_dir():
        raise NotFound(
            f"There is no checkpoint folder {folder}. Give Checkpointer the one that a run has saved into."
        )


Busy = Literal["wait", "skip", "replace"]
Replicas = Literal["spread", "check", "rank0"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `Checkpointer`."""

    attest: bool = True
    when_busy: Busy = "wait"
    timeout_s: float = 600.0
    shard_bytes: int = 4 << 30
    max_write_bytes_s: float | None = None
    max_memory_bytes: float | None = None
    max_device_bytes: float | None = None
    keep_s: float = 0.0
    peer_memory: bool = False
    replicas: Replicas = "spread"
    process_group: "dist.ProcessGroup | None" = None
