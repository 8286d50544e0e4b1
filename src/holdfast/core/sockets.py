"""Wait for any of many file descriptors to become readable."""

import select
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Return the descriptors that are readable or whose other side is closed.

    Waits up to `timeout_s` seconds for the first one; None: without a limit. select(2) would refuse the descriptors of
    a trainer that has a thousand files open.
    """
    polled = select.poll()
    for fd in fds:
        polled.register(fd, select.POLLIN)
    return [fd for fd, _events in polled.poll(None if timeout_s is None else timeout_s * 1000)]
