"""Marks a checkpoint for ever, and reports each mark that is durable. Usage: killed_marker.py CHECKPOINT WRITER."""

import sys
from pathlib import Path

from holdfast.checkpoint.catalog.annotations import note_metrics

if __name__ == "__main__":
    number = 0
    while True:
        number += 1
        # So much that it does not fit into one page.
        note_metrics(
            Path(sys.argv[1]),
            {f"{sys.argv[2]}-{each:03}": number for each in range(200)},
            now_s=float(number),
        )
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
