"""Wait for the actions of other processes."""

import os
import time

ENDS_S = 240.0
"""The limit by which every awaited event has come; otherwise the test fails."""


def until(condition):
    until_s = time.monotonic() + ENDS_S
    while True:
        began_s = time.monotonic()
        if condition():
            return
        ended_s = time.monotonic()
        assert ended_s < until_s, "it does not come"
        # The awaited processes use the same cores, so the checks take a fifth of a core at most.
        time.sleep(max(0.002, 4 * (ended_s - began_s)))


def contents(folder):
    """Return the files of a checkpoint folder, without the files of the lease and the lineage."""
    return [
        path for path in folder.iterdir() if path.name not in (".holdfast-writer", ".holdfast-line")
    ]


def open_descriptors():
    """Return the open file descriptors; descriptors of earlier tests may be closed at any time."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - names alone
    # Without the descriptor of the listing, which is closed by now and differs each time.
    return {int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}
