"""Wait for any of many file descriptors to become readable; find free ports; write addresses."""

import ipaddress
import random
import select
import socket
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


LISTENING_PORTS = range(10_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections and to those who bind port 0 (ip(7))."""


def free_ports(count: int, *, host: str = "") -> list[int]:
    """Return ports of this machine that nobody listens at, so that another program can.

    Raises:
        OSError: there are too few.
    """
    sockets: list[socket.socket] = []
    try:
        # All held at once, so that they differ.
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
    """Return an address as it is written elsewhere: one of IPv4 without its prefix for IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
