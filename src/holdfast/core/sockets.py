"""Wait for any of many file descriptors to become readable."""

import select
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Those that have something to read, or whose other side is gone; waits for one, None: for as long as it takes.

    select(2) would refuse those of a trainer that has a thousand files open.
    """
    polled = select.poll()
    for fd in fds:
        polled.register(fd, select.POLLIN)
    return [fd for fd, _events in polled.poll(None if timeout_s is None else timeout_s * 1000)]
