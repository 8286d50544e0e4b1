"""Hosts on one machine: network namespaces with addresses of their own, on one switch whose cables can be cut."""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Self

_NETWORK = "10.99.0"
_MADE = threading.Lock()
_made = 0


class Hosts:
    """Some hosts, for as long as the `with` block lasts. Needs root and iproute2: see `missing`.

    Give ranks `GLOO_SOCKET_IFNAME` with `interface`: this machine's name stands for its loopback address there.
    """

    interface = "c0"

    def __init__(self, count: int) -> None:
        """Name the hosts; they are made on entry.

        Args:
            count: of the hosts, up to 200.
        """
        global _made  # noqa: PLW0603 - the names of namespaces are one space for the machine
        with _MADE:
            _made += 1
            stem = f"hf{os.getpid()}-{_made}"
        self._switch = f"{stem}-s"
        self.names = [f"{stem}-{number}" for number in range(1, count + 1)]
        self._cut: set[int] = set()

    @staticmethod
    def missing() -> str | None:
        """Return why there can be no hosts here; None where there can be."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return "network namespaces need root and iproute2"
        probe = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
        return "no network namespaces here" if probe.returncode != 0 else None

    def __enter__(self) -> Self:
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, name in enumerate(self.names):
            port = f"p{number}"
            end = ("type", "veth", "peer", port, "netns", self._switch)
            _ip("link", "add", self.interface, "netns", name, *end)
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", self.interface)
            _ip("-n", name, "link", "set", self.interface, "up")
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):
            _ip("netns", "delete", name)

    def address(self, number: int) -> str:
        """Return the address of a host; numbers begin at 0."""
        return f"{_NETWORK}.{number + 1}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def cut(self, number: int) -> None:
        """Cut the cable of a host."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "down")
        self._cut.add(number)

    def mend(self, number: int) -> None:
        """Mend the cable of a host."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "up")
        self._cut.discard(number)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
