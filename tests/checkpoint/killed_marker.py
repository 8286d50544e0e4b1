"""Mark a checkpoint again and again, and report each durable mark.

Usage: `killed_marker.py CHECKPOINT WRITER`.
"""

import sys
from pathlib import Path

from holdfast.checkpoint.catalog.annotations import note_metrics

if __name__ == "__main__":
    number = 0
    while True:
        number += 1
        # So much text that the mark does not fit into one page.
        note_metrics(
            Path(sys.argv[1]),
            {f"{sys.argv[2]}-{each:03}": number for each in range(200)},
            now_s=float(number),
        )
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
