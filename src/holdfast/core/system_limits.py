"""Name the system limits that a save can exceed, with the commands that set them."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.core.errors import CheckpointError

_RAISE: Final = "Raise that limit where the job is started"


def in_words(error: BaseException) -> str:
    """Return the text of an error; if a system limit caused it, add the limit and its value."""
    found = _limit(error) if isinstance(error, OSError) else None
    return str(error) if found is None else f"{error}; {found[0]}"


def advice_on(error: BaseException) -> str:
    """Return advice on the system limit that caused an error; empty if no limit caused it.

    The function reads only the error's `errno`, so it also accepts errors of other ranks.
    """
    found = _limit(error)
    return "" if found is None else found[1]


@contextmanager
def naming_limits(consequence: str) -> Iterator[None]:
    """Convert an OSError of the block that a system limit caused to an error that names the limit.

    Raises:
        CheckpointError: a system limit was reached; the message begins with `consequence`, and ends
            with advice.
    """
    try:
        yield
    except OSError as error:
        if advice := advice_on(error):
            raise CheckpointError(f"{consequence}: {in_words(error)}. {advice}") from error
        raise


def allowed_by_limit(code: int) -> str:
    """Return a clause with a limit's value: "`ulimit -n` allows a process 1,024 open files".

    Args:
        code: the error number of an operation that the limit stops: EMFILE, ENFILE or EFBIG.
    """
    found = _limit(OSError(code, ""))
    assert found is not None, "the number is one of the three"
    return found[0]


def _limit(error: BaseException) -> tuple[str, str] | None:
    code = getattr(error, "errno", None)
    if code == errno.EMFILE:
        count, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = f"`ulimit -n` allows a process {count:,} open files"
        return allowed, f"{_RAISE} (`ulimit -n`), or keep fewer files open in the script."
    if code == errno.ENFILE:
        allowed = f"`sysctl fs.file-max` allows all processes of the node together {_file_max()} open files"
        return (
            allowed,
            "Raise that limit of the node (`sysctl fs.file-max`), or run fewer processes there.",
        )
    if code == errno.EFBIG:
        size_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if size_bytes == resource.RLIM_INFINITY:
            allowed = "`ulimit -f` allows files of any size, and the file system does not"
            return allowed, "Give Checkpointer a folder of another file system."
        allowed = f"`ulimit -f` allows a process files of {size_bytes:,} bytes"
        return allowed, f"{_RAISE} (`ulimit -f unlimited`)."
    return None


def _file_max() -> str:
    try:
        return f"{int(Path('/proc/sys/fs/file-max').read_text()):,}"
    except (OSError, ValueError):  # reading the limit opens a file, too
        return "so many"
