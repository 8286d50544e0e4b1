"""A text file as a stream, unpacked where it is compressed, and its faults as a user's error."""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.plain_text import opened


@contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    r"""The file's text, without a byte order mark; only `\n` ends a line, and what is no UTF-8 is replaced.

    Raises:
        BadTrace: it cannot be read, also while it is being read.
    """
    if path.suffix == ".zst":  # which Python reads from 3.14 only
        raise BadTrace(path, "It is compressed by Zstandard.", next_step="Unpack it: zstd -d FILE.")
    try:
        with opened(path) as file:
            yield io.TextIOWrapper(
                cast("io.BufferedReader", file), "utf-8-sig", errors="replace", newline="\n"
            )
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(
            path,
            f"The file cannot be read: {error}.",
            next_step="Check that it is whole and readable.",
        ) from error


def cluster_name(path: Path) -> str:
    """What a cluster is called whose records do not say: the file's name up to its first dot."""
    return path.name.partition(".")[0] or path.name
