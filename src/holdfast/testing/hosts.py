"""Emulate several hosts on one machine, as network namespaces that a virtual switch connects.

    with Hosts.made(["node1", "node2"]) as hosts:
        subprocess.Popen(hosts.command("node1", ["python", "train.py"]), env=…)

Each host has its own address. Processes of all hosts share the files and the process ids of the
machine. Each host resolves the names of all hosts, and resolves the name of the machine to its own
address. There are no other hosts, and there is no name server. The machine's own network does not
change, because the switch is also in a separate namespace. The names of the namespaces contain the
id of the process that made them, so that the next `Hosts.made` can delete the namespaces of a
killed process. This needs Linux, root and the commands `ip` (iproute2) and `unshare` (util-linux).
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.core.errors import HoldfastError

INTERFACE = "eth0"
MAX_HOSTS = 250
_FILES = Path("/etc/netns")
"""`ip netns exec NAME` replaces files of /etc by the files in the subfolder NAME of this folder."""
_NAMESPACE = re.compile(r"^holdfast-(\d+)-[0-9a-f]+-\S+")
_COMMAND_S = 30.0
"""Seconds within which an `ip` command must end."""


class NoHosts(HoldfastError):
    """This machine cannot emulate hosts; the message states the reason."""


@dataclass(frozen=True)
class Hosts:
    """Emulated hosts that exist until the end of the `with` block that created them.

    Attributes:
        addresses: the IPv4 address of each host, by the host's name.
    """

    addresses: Mapping[str, str]
    _prefix: str

    @classmethod
    @contextlib.contextmanager
    def made(cls, names: Sequence[str]) -> Iterator["Hosts"]:
        """Create a host for each name; delete the hosts at the end of the block.

        A process that still runs on a host then keeps the host's network until the process ends.

        Raises:
            NoHosts: the machine cannot emulate hosts; nothing is left behind.
        """
        assert len(names) <= MAX_HOSTS
        if (why := cls.missing()) is not None:
            raise NoHosts(why)
        delete_stale()
        prefix = f"holdfast-{os.getpid()}-{secrets.token_hex(2)}"
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        hosts = cls(addresses, prefix)
        try:
            hosts._make()
            yield hosts
        finally:
            for name in ("switch", *names):
                _delete(f"{prefix}-{name}")

    @staticmethod
    def missing() -> str | None:
        """Return why this machine cannot emulate hosts; None if it can."""
        if os.geteuid() != 0:
            return "only root may make network namespaces"
        if shutil.which("ip") is None:
            return "the command ip is missing (Debian: apt-get install iproute2)"
        if shutil.which("unshare") is None:
            return "the command unshare is missing (Debian: apt-get install util-linux)"
        probe = _quietly("unshare", "--net", "true")
        return None if probe == 0 else "the kernel makes no network namespaces here"

    @property
    def namespaces(self) -> dict[str, str]:
        """Return the network namespace of each host, by the host's name."""
        return {name: f"{self._prefix}-{name}" for name in self.addresses}

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host.

        The started process is the one of `command` itself, because `ip` replaces itself by it.
        """
        return ["ip", "netns", "exec", self.namespaces[name], *command]

    def cut(self, name: str) -> None:
        """Disconnect a host from the switch."""
        self._switch_port(name, "down")

    def mend(self, name: str) -> None:
        """Connect a host to the switch again."""
        self._switch_port(name, "up")

    def _switch_port(self, name: str, state: str) -> None:
        port = f"port{list(self.addresses).index(name) + 1}"
        _ip("-n", f"{self._prefix}-switch", "link", "set", port, state)

    def environment(self, name: str) -> dict[str, str]:
        """Return environment variables for the processes of a host.

        They set the name of the node, and the network interface for gloo and NCCL.
        """
        return {
            "HOLDFAST_NODE_NAME": name,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def _make(self) -> None:
        switch = f"{self._prefix}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, (name, address) in enumerate(self.addresses.items(), 1):
            host, port = f"{self._prefix}-{name}", f"port{number}"
            self._write_names(host, address)
            _ip("netns", "add", host)
            cable = ["type", "veth", "peer", "name", INTERFACE, "netns", host]
            _ip("-n", switch, "link", "add", port, *cable)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
            # Programs look up the route to a remote address to find their own address.
            _ip("-n", host, "route", "add", "default", "dev", INTERFACE)

    def _write_names(self, host: str, own_address: str) -> None:
        known = {"localhost": "127.0.0.1", socket.gethostname(): own_address, **self.addresses}
        # Programs that listen for IPv6, too, look up IPv4 addresses in their IPv6 form.
        lines = [
            f"{form}{address} {name}\n"
            for name, address in known.items()
            for form in ("", "::ffff:")
        ]
        try:
            (_FILES / host).mkdir(parents=True)
            (_FILES / host / "hosts").write_text("".join(lines))
            # Without a name server in this file, the resolver sends its requests to this host
            # itself, which refuses them at once.
            (_FILES / host / "resolv.conf").write_text("")
        except OSError as error:
            raise NoHosts(f"{_FILES} cannot be written: {error.strerror}") from error


def delete_stale() -> list[str]:
    """Delete the namespaces that ended processes have left behind; return their names."""
    if shutil.which("ip") is None:
        return []
    listed = _ip("netns", "list")
    found = [match for line in listed.splitlines() if (match := _NAMESPACE.match(line))]
    stale = [match[0] for match in found if not psutil.pid_exists(int(match[1]))]
    for name in stale:
        _delete(name)
    return stale


def _delete(name: str) -> None:
    _quietly("ip", "netns", "delete", name)
    shutil.rmtree(_FILES / name, ignore_errors=True)


def _quietly(*words: str) -> int | None:
    """Run a command without output; return its exit code, or None if it did not end in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(words, capture_output=True, timeout=_COMMAND_S, check=False)
        return done.returncode
    return None


def _ip(*words: str) -> str:
    """Run an `ip` command; return its output."""
    try:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoHosts(f"ip {' '.join(words)}: {error}") from error
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NoHosts(f"ip {' '.join(words)}: {reason}")
    return done.stdout
