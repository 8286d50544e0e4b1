"""Python imports this at the start of every process that the tests start (see `conftest.py`).

A third of what a process that imports torch costs is looking for reference cycles among its 300,000 objects, in vain:
while it imports, and once more when it ends.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)  # the first registered, and so the last to be called
