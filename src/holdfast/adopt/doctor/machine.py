"""Check the storage for checkpoints, the clock, and the ports of this host."""

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from holdfast.adopt.doctor.findings import Finding, good, unseen, wrong
from holdfast.core.sockets import LISTENING_PORTS, free_ports

MIB: Final = 1 << 20
GIB: Final = 1 << 30
WRITTEN_BYTES: Final = 256 * MIB
WRITING_S: Final = 2.0
"""The longest time to write for the measurement, so that a slow file system gets fewer bytes."""
MIN_BYTES_S: Final = 50 * MIB
"""A lower rate than this is reported; at this rate, 10 GiB of state take over three minutes."""
MIN_FREE_BYTES: Final = 10 * GIB
MIN_FREE_FILES: Final = 10_000
CONNECT_S: Final = 5.0
PORTS: Final = 16


def storage(folder: Path) -> Iterator[Finding]:
    """Measure how fast a file can be written durably to the folder, and check the free space."""
    yield from storage_of(folder, time.monotonic)


def storage_of(folder: Path, clock_s: Callable[[], float]) -> Iterator[Finding]:
    """Measure the storage of a folder; if it does not exist, of the nearest existing parent folder.

    Args:
        folder: the folder for checkpoints.
        clock_s: returns monotonic seconds.
    """
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        yield wrong(f"{there} is not a folder.", "holdfast doctor FOLDER")
        return
    other = "holdfast doctor FOLDER  # with a folder of another file system"
    space = os.statvfs(there)
    free = space.f_bavail * space.f_frsize
    if free < MIN_FREE_BYTES:
        mend = f"holdfast checkpoint prune {shlex.quote(str(folder))} --last 3 --dry-run"
        yield wrong(f"{there} has {free / GIB:.1f} GiB of free space.", mend)
    if space.f_files and space.f_favail < MIN_FREE_FILES:
        yield wrong(f"{there} has room for {space.f_favail:,} more files.", f"df -i {there}")
    try:
        written, seconds = _write(there, clock_s)
    except OSError as error:
        yield wrong(f"{there} cannot be written: {error.strerror}.", other)
        return
    rate = written / max(seconds, 1e-9)
    words = f"{there} takes {rate / MIB:,.0f} MiB/s, written durably"
    if rate < MIN_BYTES_S:
        yield wrong(f"{words}: saves take long.", other)
    else:
        yield good(f"{words}; {free / GIB:,.0f} GiB are free.")


def _write(folder: Path, clock_s: Callable[[], float]) -> tuple[int, float]:
    """Write a file durably, for a few seconds at most, and delete it.

    Returns:
        The number of bytes, and the seconds that writing them took.
    """
    block = os.urandom(8 * MIB)  # a file system may compress
    path = folder / f".holdfast-doctor-{os.getpid()}"
    try:
        began_s = clock_s()
        with path.open("xb", buffering=0) as file:
            written = 0
            while written < WRITTEN_BYTES and clock_s() - began_s < WRITING_S:
                written += file.write(block)
            os.fsync(file.fileno())
        return written, clock_s() - began_s
    finally:
        path.unlink(missing_ok=True)


def clock(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check that the kernel's clock is synchronised."""
    from holdfast.recover import clock_is_synchronised

    yield clock_finding(clock_is_synchronised())


def clock_finding(is_synchronised: bool | None) -> Finding:
    """Return the finding for a clock; `is_synchronised` is None if the kernel gives no answer."""
    if is_synchronised is None:
        return unseen(
            "The kernel does not report whether the clock is synchronised.", "chronyc tracking"
        )
    if not is_synchronised:
        return wrong(
            "The clock of this host is not synchronised: times of several nodes do not compare.",
            "sudo timedatectl set-ntp true  # on the host, not in a container",
        )
    return good("The clock is synchronised.")


def ports(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check that programs on this host can listen, and can be reached by the host's name."""
    yield from range_of_ports(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    try:
        free_ports(PORTS)
    except OSError as error:
        yield wrong(f"No program can listen on a port here: {error}.", "ss --listening --tcp")
        return
    yield from reached_by_name(socket.gethostname())


def range_of_ports(path: Path) -> Iterator[Finding]:
    """Check that outgoing connections do not use the ports on which nodes listen.

    `path` is the file with the kernel's range of ports for outgoing connections.
    """
    try:
        first = int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError) as error:
        yield unseen(f"The range of ports is not read: {error}.", f"cat {path}")
        return
    if first < LISTENING_PORTS.stop:
        yield wrong(
            f"Outgoing connections take ports from {first} on, where nodes of a run listen.",
            'sudo sysctl net.ipv4.ip_local_port_range="32768 60999"',
        )


def reached_by_name(name: str) -> Iterator[Finding]:
    """Check that a program that listens at the host's name can be reached there."""
    in_hosts = f'echo "ADDRESS {name}" | sudo tee -a /etc/hosts'
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield wrong(f"The name of this host, {name}, has no address: {error}.", in_hosts)
        return
    family, address = found[0][0], str(found[0][4][0])
    try:
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()[:2], CONNECT_S):
                pass
    except OSError as error:
        yield wrong(f"{name} ({address}) cannot be reached from here: {error}.", in_hosts)
        return
    if address.startswith("127.") or address == "::1":
        yield good(
            f"{name} is {address}, which other nodes do not reach. One node needs no more; for several "
            "nodes, set GLOO_SOCKET_IFNAME and pass --rendezvous with an address."
        )
    else:
        yield good(f"{PORTS} ports are free, and {name} is reached at {address}.")
