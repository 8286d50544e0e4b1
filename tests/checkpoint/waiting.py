"""Waiting for what other processes do."""

import os
import time

ENDS_S = 240.0
"""By then all has ended that is waited for; a failure of the test otherwise."""


def until(condition):
    until_s = time.monotonic() + ENDS_S
    while True:
        began_s = time.monotonic()
        if condition():
            return
        ended_s = time.monotonic()
        assert ended_s < until_s, "it does not come"
        # What is waited for runs on the same cores: to look takes a fifth of them at most.
        time.sleep(max(0.002, 4 * (ended_s - began_s)))


def contents(folder):
    """What is in a checkpoint folder, but for the notes of who saves there and of what is abandoned."""
    return [
        path for path in folder.iterdir() if path.name not in (".holdfast-writer", ".holdfast-line")
    ]


def open_descriptors():
    """Return the open file descriptors; what earlier tests held may be closed at any time."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - names alone
    # Without that of the listing itself, which is closed by now, and is another one each time.
    return {int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}
