"""Push from child processes, which a test may kill. Each line on stdin is: ENDPOINT URL FOLDER.

Prints the child's process id, and its exit status at its end. The child is forked, so that modules
are imported once.
"""

import os
import sys

import obstore  # noqa: F401 - imported once, here; its threads begin in the child
from storage_world import PART_BYTES, QUICK

from holdfast.checkpoint.storage.remote import Remote

for line in sys.stdin:
    os.environ["AWS_ENDPOINT_URL"], url, folder = line.split()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        status = 1
        try:
            Remote(url, patience=QUICK, part_bytes=PART_BYTES).push(folder)
            status = 0
        finally:
            os._exit(status)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    os.write(writer, b"x")
    sys.stdout.write(f"{os.waitpid(child, 0)[1]}\n")
    sys.stdout.flush()
    os.close(reader)
    os.close(writer)
