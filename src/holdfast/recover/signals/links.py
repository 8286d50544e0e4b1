"""Read the network links of a node and their error counters in /sys/class."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.recover.signals.facts import CannotSee, Fact, NodeSignal

ERRORS = 100
"""This number of new errors of a link since the first look is reported as a fact.

After that, each doubling is reported.
"""
_ETHERNET = ("statistics/rx_errors", "statistics/tx_errors")
_INFINIBAND = (
    "counters/symbol_error",
    "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "counters/link_error_recovery",
)


class Links:
    """The physical Ethernet and InfiniBand links of this node."""

    name = "the network links"
    period_s = 5.0

    def __init__(self, root: Path = Path("/sys/class")) -> None:
        """Store `root`, the folder with `net` and `infiniband`."""
        self._root = root
        self._were_up: set[str] = set()
        """The links that were up at any look. Others do not count, since a port without a cable is
        no fault.
        """
        self._first: dict[str, int] = {}
        self._first_downs: dict[str, int] = {}

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        if not (self._root / "net").is_dir():
            raise CannotSee(f"{self._root / 'net'} is not there")
        facts: list[Fact] = []
        for where, is_up, errors, downs in (*self._ethernet(), *self._infiniband()):
            if is_up:
                self._were_up.add(where)
            elif where in self._were_up:
                facts.append(self._signal("link-down", where, f"{where} is down"))
            new = errors - self._first.setdefault(where, errors)
            if new >= ERRORS:
                level = ERRORS << (new // ERRORS).bit_length() - 1
                text = f"{where} had more than {level} errors since the start"
                facts.append(self._signal("link-errors", where, text, level))
            fallen = downs - self._first_downs.setdefault(where, downs)
            if fallen > 0:
                text = f"{where} was down {fallen} times since the start"
                facts.append(self._signal("link-flapped", where, text, fallen))
        return facts

    def _ethernet(self) -> Iterator[tuple[str, bool, int, int]]:
        for link in sorted((self._root / "net").iterdir()):
            if not (link / "device").exists():
                continue  # a virtual link of a container or a tunnel
            is_up = _text(link / "operstate") == "up"
            errors = sum(_count(link / each) for each in _ETHERNET)
            yield link.name, is_up, errors, _count(link / "carrier_down_count")

    def _infiniband(self) -> Iterator[tuple[str, bool, int, int]]:
        for port in sorted((self._root / "infiniband").glob("*/ports/*")):
            where = f"{port.parent.parent.name} port {port.name}"
            is_up = "ACTIVE" in _text(port / "state")
            errors = sum(_count(port / each) for each in _INFINIBAND)
            yield where, is_up, errors, _count(port / "counters/link_downed")

    def _signal(self, name: str, where: str, text: str, count: int = 1) -> NodeSignal:
        return NodeSignal(source=self.name, name=name, where=where, text=text, count=count)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _count(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
