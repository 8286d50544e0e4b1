"""The process that converts a checkpoint for `holdfast.evaluate`: CHECKPOINT FOLDER, the settled conversion on stdin.

Only the ranges that `Conversion.ranges` names need to be in the checkpoint's files. What goes wrong is one line on
standard error.
"""

import sys
from pathlib import Path

from holdfast.core.processes import die_with_parent


def main() -> int:
    """Convert; returns the exit code."""
    die_with_parent()
    checkpoint, folder = map(Path, sys.argv[1:])

    from holdfast.checkpoint.convert.safetensors import Conversion, write_safetensors
    from holdfast.checkpoint.format.dcp_metadata import read_metadata
    from holdfast.checkpoint.format.manifest import ManifestError
    from holdfast.core.errors import HoldfastError

    try:
        write_safetensors(
            checkpoint, read_metadata(checkpoint), Conversion.from_text(sys.stdin.read()), folder
        )
    except (HoldfastError, ManifestError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
