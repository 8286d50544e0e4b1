"""Probe a service or a storage whose outage ended the job, so that the restart waits for its end.

The restart after a cause outside the job waits for a time that does not depend on the outage. If the
lines that prove the cause name a service or a folder, the supervisor probes it during this wait. A
failed probe delays the restart, so that a long outage does not use up the restarts. The first
success after a failed probe lets the restart begin at once.

A probe of a service is only a TCP connection, and a probe of a folder only asks for its file system.
So a success without an earlier failure proves nothing, and the wait stays as it is.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.recover import policy

PROBE_EVERY_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 5.0
KILLED_S: Final = 1.0
"""The seconds that a killed probe gets to end."""
MAX_PROBED: Final = 4
"""The most services and folders that are probed; the first lines are nearest to the root."""
PORTS: Final = {"http": 80, "https": 443, "redis": 6379, "postgresql": 5432, "mongodb": 27017}
"""The schemes of the URLs that are probed, with their usual ports. The store of torch.distributed
(`tcp`) is left out, since it ends with the job."""
GONE: Final = (
    "Stale file handle",
    "Input/output error",
    "not connected",
    "Host is down",
    "timed out",
)
"""The words of stat(1) about a file system whose server is away."""

_URL = re.compile(rf"\b(?:{'|'.join(PORTS)})://[^\s'\"<>()]+")
_POOL = re.compile(r"\bhost='([^']+)', port=(\d{1,5})\b")
_QUOTED_PATH = re.compile(r"['\"](/[^'\"\0]+)['\"]")


@dataclass(frozen=True)
class Service:
    """A network service."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    async def answers(self) -> bool:
        """Return True if the service accepts a connection."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.host, self.port)
        except (OSError, ValueError, OverflowError):  # includes TimeoutError and malformed names
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


@dataclass(unsafe_hash=True)
class Storage:
    """A folder of a file system that may hang."""

    folder: Path
    _stuck: asyncio.subprocess.Process | None = field(default=None, compare=False)
    """A killed probe that is stuck in the kernel."""

    def __str__(self) -> str:
        return str(self.folder)

    async def answers(self) -> bool:
        """Return True unless the file system of the folder hangs, or reports that it is away."""
        if self._stuck is not None and self._stuck.returncode is None:
            return False
        try:
            process = await asyncio.create_subprocess_exec(
                *("stat", "--file-system", "--", str(self.folder)),
                env={**os.environ, "LC_ALL": "C"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError:  # this host cannot probe
            return True
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                self._stuck = process
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    process.kill()
                    async with asyncio.timeout(KILLED_S):
                        await process.wait()
        return not any(word in errors.decode(errors="replace") for word in GONE)


def named_in(lines: Iterable[str], *, own: Collection[str] = ()) -> Sequence[Service | Storage]:
    """Return the services and folders that lines name, without duplicates.

    Left out are services that this host reaches by a proxy only, and services of the job itself,
    which come back only with the job: those on this host and on the hosts in `own`.

    Args:
        lines: the lines.
        own: the names and addresses of the hosts of the job.
    """
    found: list[Service | Storage] = []
    for line in lines:
        for url in _URL.findall(line):
            with contextlib.suppress(ValueError):
                parts = urlsplit(url)
                if parts.hostname:
                    port = PORTS[parts.scheme] if parts.port is None else parts.port
                    found.append(Service(parts.hostname, port))
        found += [Service(host, int(port)) for host, port in _POOL.findall(line)]
        found += [Storage(Path(path).parent) for path in _QUOTED_PATH.findall(line)]
    probed = [
        one
        for one in found
        if isinstance(one, Storage)
        or not (_is_loopback(one.host) or one.host in own or _needs_proxy(one))
    ]
    return list(dict.fromkeys(probed))[:MAX_PROBED]


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    return address.is_loopback or address.is_unspecified


def _needs_proxy(service: Service) -> bool:
    scheme = "https" if service.port == PORTS["https"] else "http"
    has_proxy = bool(urllib.request.getproxies().keys() & {scheme, "all"})
    return has_proxy and not urllib.request.proxy_bypass(service.host)


class Outage:
    """The probes during the wait before one restart."""

    def __init__(
        self,
        decide_on: Callable[[policy.Event], None],
        observe: Callable[[str, Mapping[str, Any]], None],
        note: Callable[[Sequence[str]], None],
    ) -> None:
        """Store the collaborators.

        Args:
            decide_on: a function that passes an event to the policy.
            observe: a function that receives the events of the run.
            note: a function that adds sentences to the explanation of the incident.
        """
        self._decide_on = decide_on
        self._observe = observe
        self._note = note

    async def probe(
        self, probed: Sequence[Service | Storage], is_waiting: Callable[[], bool]
    ) -> None:
        """Probe until everything answers again or the wait is over.

        Args:
            probed: the services and folders.
            is_waiting: a function that returns True while the restart waits.
        """
        down_since_s: float | None = None
        while probed and is_waiting():
            answers = await asyncio.gather(*(one.answers() for one in probed))
            silent = [one for one, does in zip(probed, answers, strict=True) if not does]
            if not is_waiting():
                return
            if silent:
                names = ", ".join(map(str, silent))
                if down_since_s is None:
                    down_since_s = time.monotonic()
                    text = f"{names} does not answer; the restart waits for it."
                    self._observe("nodes", {"text": text})
                self._decide_on(policy.OutageLasts())
            elif down_since_s is not None:
                lasted_s = time.monotonic() - down_since_s
                names = ", ".join(map(str, probed))
                self._note([f"{names} answered again after {lasted_s:.0f} s of probes."])
                self._observe("nodes", {"text": f"{names} answers again: restarting."})
                self._decide_on(policy.OutageOver())
                return
            await asyncio.sleep(PROBE_EVERY_S)
