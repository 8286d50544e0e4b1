"""Define the types of options that name an output file or folder.

The path is checked before the command does any work.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from holdfast.core.errors import BadUse


class _Output(click.Path):
    """Check that a file or folder can be written at the path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        check_output(path)
        return path


OUTPUT_FILE = _Output(path_type=Path, dir_okay=False)
OUTPUT_FOLDER = _Output(path_type=Path, file_okay=False)


def check_output(path: Path) -> None:
    """Check that a file or folder can be written at a path, without changing anything there.

    Raises:
        BadUse: nothing can be written there.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a device or a pipe, such as /dev/stdout
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        # Permissions prove nothing: root has all of them, even on a read-only file system.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadUse(
            f"Nothing can be written at {path}: {error.strerror}. Name another place."
        ) from error
