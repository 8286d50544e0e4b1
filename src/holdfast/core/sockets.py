"""Wait for any of many file descriptors to become readable; find free ports; write addresses."""

import ipaddress
import random
import select
import socket
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Return the descriptors that are readable or whose other side is closed.

    The function waits up to `timeout_s` seconds for the first one; None: without a limit.
    """
    # Not select(2), which refuses descriptors of 1024 and more: a trainer has many open files.
    polled = select.poll()
    for fd in fds:
        polled.register(fd, select.POLLIN)
    return [fd for fd, _events in polled.poll(None if timeout_s is None else timeout_s * 1000)]


LISTENING_PORTS = range(10_000, 32_000)
"""Ports below the range from which the kernel serves outgoing connections and port 0 (ip(7))."""


def free_ports(count: int, *, host: str = "") -> list[int]:
    """Return ports of this machine on which no program listens, so that another program can.

    Raises:
        OSError: the machine has too few free ports.
    """
    sockets: list[socket.socket] = []
    try:
        # All ports are held at once, so that they differ.
        for port in random.sample(LISTENING_PORTS, len(LISTENING_PORTS)):
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
    """Return an address in its usual form: an IPv4 address without its prefix for IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
