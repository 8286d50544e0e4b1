"""Find faulty nodes from the signals of their hardware.

The reasons are those of Table 3 of the study; `diagnose` has the meanings of NVIDIA's Xid codes. A
signal is decisive if the node cannot work until it is repaired or reset, for example because a GPU
has fallen off the bus. Other signals of the hardware only corroborate. All other signals, such as
an Xid that a program can cause, are only recorded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.core.errors import BadUse
from holdfast.diagnose import packaged_rules
from holdfast.recover.signals.facts import NodeSignal
from holdfast.recover.signals.kernel import KernelLog

RECENT_S = 600.0
"""Signals of a node within this number of seconds belong to the same fault, and to a failure of the
job at that time.
"""

Weight = Literal["decisive", "hardware", "record"]


@dataclass(frozen=True)
class Meaning:
    """The meaning of a signal."""

    weight: Weight
    reason: str
    """The reason for a diagnosis (see `diagnose.CATEGORIES`)."""


MEANINGS: Final[Mapping[str, Meaning]] = {
    "gpu-lost": Meaning("decisive", "NodeFailure"),
    "gpu-needs-reset": Meaning("decisive", "CUDAError"),
    "row-remap-failure": Meaning("decisive", "ECCError"),
    "row-remap-pending": Meaning("hardware", "ECCError"),
    "ecc-uncorrectable": Meaning("hardware", "ECCError"),
    "gpu-slowed": Meaning("hardware", "NodeFailure"),
    "nvlink-down": Meaning("hardware", "NVLinkError"),
    "nvlink-errors": Meaning("hardware", "NVLinkError"),
    "link-down": Meaning("hardware", "NetworkError"),
    "link-flapped": Meaning("hardware", "NetworkError"),
    "link-errors": Meaning("hardware", "NetworkError"),
    "nic-fault": Meaning("decisive", "NetworkError"),
    "nic-stuck": Meaning("hardware", "NetworkError"),
    "disk-lost": Meaning("decisive", "NodeFailure"),
    "disk-read-only": Meaning("decisive", "NodeFailure"),
    "disk-failing": Meaning("hardware", "NodeFailure"),
    "disk-error": Meaning("hardware", "NodeFailure"),
    "file-system-error": Meaning("hardware", "NodeFailure"),
    "disk-full": Meaning("record", "OSError"),
    "memory-uncorrectable": Meaning("hardware", "ECCError"),
    "machine-check": Meaning("hardware", "NodeFailure"),
    "cpu-lockup": Meaning("hardware", "NodeFailure"),
    "oom-kill": Meaning("record", "OutOfMemoryError"),
    "clock-jump": Meaning("record", "Others"),
    "clock-unsynchronised": Meaning("record", "Others"),
    "scheduler-pressure": Meaning("record", "Others"),
    "scheduler-down": Meaning("hardware", "NodeFailure"),
}
"""The meaning of each signal whose name contains no error code of a driver."""
_RECORD = Meaning("record", "Others")
_HARDWARE_KINDS = frozenset({"gpu_memory", "gpu_link", "gpu_lost", "node", "fabric"})
_DECISIVE_ACTIONS = frozenset({"exclude_and_restart", "reset_gpu"})


def meaning_of(signal: NodeSignal) -> Meaning:
    """Return the meaning of a signal.

    The meaning of a driver's error code comes from the rules of the diagnosis.
    """
    known = MEANINGS.get(signal.name)
    if known is not None:
        return known
    if not signal.name.startswith(("xid-", "sxid-")):
        return _RECORD
    try:
        found = packaged_rules().find(signal.text)
    except BadUse:  # a rule file was edited and is broken
        return _RECORD
    if found is None:
        return _RECORD
    rule, _ = found
    if rule.action in _DECISIVE_ACTIONS:
        return Meaning("decisive", rule.reason)
    is_hardware = rule.kind in _HARDWARE_KINDS
    return Meaning("hardware" if is_hardware else "record", rule.reason)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A signal of a node, and the time at which the node saw the signal."""

    node: str
    signal: NodeSignal
    meaning: Meaning
    at_s: float
    """The time in the supervisor's monotonic seconds."""


@dataclass(frozen=True, kw_only=True)
class NodeFinding:
    """A finding that the hardware of a node is faulty, or may be."""

    culprit: str
    kind: Literal["faulty", "suspect"]
    """`faulty` if one of the signals is decisive, else `suspect`."""
    is_confirmed: bool
    """True if a second, independent source agrees with a decisive signal."""
    reason: str
    evidence: tuple[str, ...]
    sources: tuple[str, ...]


def look(seen: Iterable[Seen], now_s: float) -> tuple[NodeFinding, ...]:
    """Return the findings about nodes with recent signals of their hardware, by name.

    Args:
        seen: the present and past signals of all nodes.
        now_s: the present moment, in monotonic seconds of the supervisor.
    """
    by_node: dict[str, list[Seen]] = {}
    for one in seen:
        if one.meaning.weight != "record" and now_s - one.at_s <= RECENT_S:
            by_node.setdefault(one.node, []).append(one)
    return tuple(_finding(name, by_node[name]) for name in sorted(by_node))


def _finding(name: str, seen: list[Seen]) -> NodeFinding:
    if any(one.signal.source == KernelLog.name for one in seen):
        # The driver writes an Xid to the kernel's log and also sends it as an event, so the two are
        # not independent sources.
        seen = [
            one
            for one in seen
            if one.signal.source == KernelLog.name or not one.signal.name.startswith("xid-")
        ]
    seen = sorted(seen, key=lambda one: (one.meaning.weight != "decisive", one.at_s))
    is_faulty = seen[0].meaning.weight == "decisive"
    sources = tuple(dict.fromkeys(one.signal.source for one in seen))
    return NodeFinding(
        culprit=name,
        kind="faulty" if is_faulty else "suspect",
        is_confirmed=is_faulty and len(sources) > 1,
        reason=seen[0].meaning.reason,
        evidence=tuple(f"{one.signal.source}: {one.signal.text}" for one in seen),
        sources=sources,
    )
