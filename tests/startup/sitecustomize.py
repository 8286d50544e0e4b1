"""Python imports this at the start of every process that the tests start (see `conftest.py`).

A third of what a process that imports torch costs is looking for reference cycles among its 300,000 objects, in vain:
while it imports, and once more when it ends.
"""

import atexit
import gc
import sys


def _spare_the_last_collection():
    # DuckDB counts what is left of it at the end, and complains.
    if "torch" in sys.modules and "duckdb" not in sys.modules:
        gc.freeze()


gc.set_threshold(100_000, 20, 100)
atexit.register(_spare_the_last_collection)  # the first registered, and so the last to be called
