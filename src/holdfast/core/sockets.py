"""Wait until any of many file descriptors is readable; find free ports; format addresses."""

import ipaddress
import random
import select
import socket
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Wait until any of the file descriptors is readable, and return those that are.

    A descriptor whose other end is closed counts as readable. The function waits up to `timeout_s`
    seconds; None: without a limit. The list is empty after a timeout.
    """
    # Not select(2), which refuses descriptors of 1024 and more: a trainer has many open files.
    polled = select.poll()
    for fd in fds:
        polled.register(fd, select.POLLIN)
    return [fd for fd, _events in polled.poll(None if timeout_s is None else timeout_s * 1000)]


LISTENING_PORTS = range(10_000, 32_000)
"""Ports to listen on, below the range that the kernel assigns to outgoing connections (ip(7))."""


def free_ports(count: int, *, host: str = "") -> list[int]:
    """Return ports of this machine that no program listens on, for the caller's programs to use.

    Raises:
        OSError: the machine has too few free ports.
    """
    sockets: list[socket.socket] = []
    try:
        # All ports are held at once, so that they differ.
        # Not the generator of the module `random`: programs that seed it alike would get equal ports.
        for port in random.Random().sample(LISTENING_PORTS, len(LISTENING_PORTS)):
            if len(sockets) == count:
                break
            one = socket.socket()
            sockets.append(one)
            try:
                one.bind((host, port))
            except OSError:
                sockets.remove(one)
                one.close()
        if len(sockets) < count:
            raise OSError(
                f"no {count} free ports between {LISTENING_PORTS[0]} and {LISTENING_PORTS[-1]}"
            )
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def plain_address(address: str) -> str:
    """Return an address in its usual form; remove the IPv6 prefix of a mapped IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
