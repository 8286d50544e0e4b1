"""Python imports this at the start of every process that the tests start (see `conftest.py`).

Half of what a process that imports torch costs is the collection of reference cycles among its 300,000 objects, none of
which are garbage: while it imports, and once more when it ends.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)  # the first registered, and so the last to be called
