"""Import a checkpoint again and again, and report each step: `killed_importer.py SOURCE DIR`."""

import itertools
import sys
from pathlib import Path

from holdfast.checkpoint.convert.import_dcp import import_dcp

if __name__ == "__main__":
    for step in itertools.count(1):
        import_dcp(Path(sys.argv[1]), Path(sys.argv[2]), step)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
