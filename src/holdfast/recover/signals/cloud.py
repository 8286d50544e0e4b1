"""Read the notices of a cloud about preemption and maintenance of this virtual machine.

Each cloud has a metadata service at a link-local address, so no name must be resolved. The firmware
of the machine names the cloud, so that a host outside of these clouds sends no requests. A request
may take two seconds.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from holdfast.core.clock import Clock, SystemClock
from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, Notice, NoticeKind

ADDRESS: Final = "http://169.254.169.254"
TIMEOUT_S: Final = 2.0
PERIOD_S: Final = 5.0
"""The seconds between two requests. They are few, since AWS announces a preemption two minutes
before, and GCE and Azure thirty seconds before.
"""
UNSEEN_PERIOD_S: Final = 300.0
"""The seconds between two requests if the service does not answer, for example because the pod is
behind a firewall.
"""
MAX_BYTES: Final = 1024 * 1024
TOKEN_S: Final = "60"
GCE_PREEMPTION_S: Final = 30.0
"""The seconds from a notice of preemption to the end (Compute Engine, Preemptible VM instances)."""
GCE_GPU_MAINTENANCE_S: Final = 3600.0
"""The seconds from a notice of maintenance to the end, for machines with GPUs (Compute Engine,
Handling GPU host maintenance events).
"""
_LEAVING: Final[Mapping[str, NoticeKind]] = {
    "Preempt": "preemption",
    "Terminate": "maintenance",
    "Reboot": "maintenance",
    "Redeploy": "maintenance",
}
"""The events of Azure that take the machine away. `Freeze` is not among them, since it is a pause
of a few seconds.
"""


@dataclass(frozen=True)
class _Notice:
    """A notice as the cloud words it."""

    kind: NoticeKind
    text: str
    until_s: float | None = None
    """The Unix time in seconds at which the machine is taken away; None if the cloud states no
    time.
    """
    left_s: float | None = None
    """If the cloud states no time, the documented number of seconds from the notice on."""


class Cloud:
    """The notices in the metadata service of the cloud to which this host belongs."""

    name = "the cloud's notices"

    def __init__(
        self,
        firmware: Path = Path("/sys/class/dmi/id"),
        address: str = ADDRESS,
        clock: Clock | None = None,
    ) -> None:
        """Store what `read` needs.

        Args:
            firmware: the folder with the texts of the machine's firmware.
            address: the URL of the metadata service.
            clock: the clock of this host.
        """
        self._read = _reader_of(firmware)
        self._service = _Service(address)
        self._clock = clock or SystemClock()
        self._first_s: dict[str, float] = {}
        """For each notice that states no time, the Unix time in seconds at which it was first read.
        """
        self._has_answered = False

    @property
    def period_s(self) -> float:
        """See `Source.period_s`."""
        return PERIOD_S if self._has_answered else UNSEEN_PERIOD_S

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        if self._read is None:
            raise CannotSee("this host is not in AWS, GCE or Azure")
        notices = list(self._read(self._service))
        self._has_answered = True
        now_s = self._clock.now_s()
        self._first_s = {one.text: self._first_s.get(one.text, now_s) for one in notices}
        facts: dict[str, Fact] = {}  # one notice per kind, with its first time
        for one in sorted(notices, key=self._until_s, reverse=True):
            until_s = self._until_s(one)
            facts[one.kind] = Notice(
                source=self.name,
                kind=one.kind,
                text=one.text[:TEXT_LIMIT],
                until_s=None if math.isinf(until_s) else until_s,
            )
        return list(facts.values())

    def _until_s(self, one: _Notice) -> float:
        if one.left_s is not None:
            return self._first_s[one.text] + one.left_s
        return math.inf if one.until_s is None else one.until_s


class _Service:
    """A client of the metadata service."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, *, method: str = "GET", **headers: str) -> str:
        """Return the body of a response; an empty text if the path does not exist.

        Raises:
            CannotSee: the service does not answer, or refuses the request.
        """
        import urllib.error  # most hosts are in no cloud, and need no client
        import urllib.request

        # Use no proxy: the service would describe the proxy's machine instead of this one.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self._address + path, headers=named, method=method)
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                body: bytes = answer.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return ""
            raise CannotSee(f"{request.full_url}: {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise CannotSee(f"{request.full_url}: {getattr(error, 'reason', error)}") from error
        return body.decode(errors="replace")


def _reader_of(firmware: Path) -> Callable[[_Service], Iterator[_Notice]] | None:
    def word(name: str) -> str:
        try:
            return (firmware / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    # Machines of AWS under Xen (P3) have the vendor Xen.
    if word("sys_vendor") == "Amazon EC2" or word("bios_version").endswith(".amazon"):
        return _aws
    if word("product_name") == "Google Compute Engine":
        return _gce
    # All Hyper-V machines have the same vendor, but only those of Azure have this tag.
    if word("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":
        return _azure
    return None


def _aws(service: _Service) -> Iterator[_Notice]:
    """Read the action on a spot instance, and scheduled events (EC2 user guide, IMDSv2)."""
    # Each read requests a new token, so that no token is too old.
    token = service.get(
        "/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds=TOKEN_S
    )

    def read(path: str) -> str:
        return service.get(f"/latest/meta-data/{path}", X_aws_ec2_metadata_token=token)

    if body := read("spot/instance-action"):
        action = _object(body)
        moment = _iso(action.get("time"))
        yield _Notice("preemption", f"spot instance: {action.get('action')}", moment)
    for event in _list(read("events/maintenance/scheduled") or "[]"):
        if event.get("State") == "active":
            text = f"{event.get('Code')}: {event.get('Description')}"
            yield _Notice("maintenance", text, _mail_date(event.get("NotBefore")))


def _gce(service: _Service) -> Iterator[_Notice]:
    """Read preemption and host maintenance (Compute Engine, metadata of an instance)."""
    place = "/computeMetadata/v1/instance"
    if service.get(f"{place}/preempted", Metadata_Flavor="Google").strip() == "TRUE":
        yield _Notice("preemption", "the instance is preempted", left_s=GCE_PREEMPTION_S)
    event = service.get(f"{place}/maintenance-event", Metadata_Flavor="Google").strip()
    if event == "TERMINATE_ON_HOST_MAINTENANCE":  # a live migration does not take the machine away
        yield _Notice("maintenance", f"host maintenance: {event}", left_s=GCE_GPU_MAINTENANCE_S)


def _azure(service: _Service) -> Iterator[_Notice]:
    """Read scheduled events of this machine (Azure, Scheduled Events for Linux VMs)."""
    query = "?api-version=2021-02-01&format=text"
    name = service.get(f"/metadata/instance/compute/name{query}", Metadata="true").strip()
    body = service.get("/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    for event in _object(body).get("Events") or ():
        kind = _LEAVING.get(str(event.get("EventType")))
        # The service lists the events of all machines of a scale set.
        if kind is not None and name in (event.get("Resources") or ()):
            text = f"{event.get('EventType')}: {event.get('Description')}"
            yield _Notice(kind, text, _mail_date(event.get("NotBefore")))


def _object(body: str) -> dict[str, Any]:
    content = _json(body)
    return content if isinstance(content, dict) else {}


def _list(body: str) -> list[dict[str, Any]]:
    content = _json(body)
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _json(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise CannotSee(
            f"the metadata service sent an answer that is not JSON: {body[:60]!r}"
        ) from error


def _iso(moment: object) -> float | None:
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError:
        return None


def _mail_date(moment: object) -> float | None:
    """Convert a date such as "21 Jan 2019 09:00:43 GMT" to Unix seconds."""
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(str(moment)).timestamp()
    except ValueError:  # the date is empty once the event has begun
        return None
