"""Locate the fault: find the ranks, nodes, GPUs and links that the root's lines name or omit."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import re2
import yaml

from holdfast.diagnose.explain.diagnosis import mask_varying
from holdfast.diagnose.explain.explain import OF_PEERS, Cluster, rank_of
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.rules.rules import Rule

_SCOPE_LIMIT: Final = 64
_DIGITS: Final = re2.compile(r"\d+")
_CASELESS: Final = re2.Options()
_CASELESS.case_sensitive = False
_ABSENT_SHARE: Final = 0.34
"""Ranks that are absent from a report are suspects only if they are at most this share of all
ranks.
"""
_BESIDE_LINES: Final = 10
_OF_HOSTS: Final = frozenset({
    "gpu_memory", "gpu_link", "gpu_lost", "gpu_fault", "cuda_error", "node", "fabric", "disk", "host_memory", "frozen",
    "death", "crash",
})  # fmt: skip
"""Kinds of events for which the host that printed the line may be at fault. Exceptions are not
among them, since the program raises them."""
_OF_ITS_OWN_STATE: Final = frozenset({"disk", "host_memory"})
"""Kinds of events about full memory or storage of the host, which a restart may not free."""
_ENDS_ON_A_HOST: Final = frozenset({"cuda_error", "host_memory", "frozen", "death", "crash"})
"""Kinds of events that end a process and are evidence against its host."""
_OF_NO_PROCESS: Final = frozenset({"node", "fabric", "scheduler", "service", "disk"})
"""Kinds of faults from outside a process, so the process that ended is not at fault."""
_NOBODY: Final = re2.compile(
    r"^(?:127\.|::1$|localhost|0\.0\.0\.0$|169\.254\.|172\.17\.|fe80|unknown|none|\?|-?$)",
    _CASELESS,
)
"""Matches names that identify no node, such as loopback, link-local and container addresses."""


def scope_of(root: Cluster, same: Sequence[Event], everything: Sequence[Event]) -> dict[str, Any]:
    """Locate the fault.

    Args:
        root: the events of the root.
        same: the events with the same cause.
        everything: all events of the job.

    Returns:
        The keys `rank`, `local_rank`, `node`, `gpu` and `link`, each with a value or a list. A key
            is absent if its value is unknown.
    """
    ranks_by_pid = {
        event.captures["pid"]: int(event.captures["rank"])
        for event in everything
        if {"pid", "rank"} <= event.captures.keys()
    }
    rule, text = root.first.rule, mask_varying(root.first.text)
    alike = [event for event in same if event.rule is rule and mask_varying(event.text) == text]
    found = _named(alike, ranks_by_pid)
    wider = _named(same, ranks_by_pid)
    found = {name: values or wider[name] for name, values in found.items()}
    if found["rank"] and len(alike) == sum(event.rule is rule for event in everything):
        for event in alike:  # the scan keeps only some of many equal events
            found["rank"] |= (
                set() if rule.kind in OF_PEERS else event.log.reporters.get(rule.id, {}).keys()
            )
    if rule.kind == "collective_timeout":
        found["rank"] |= absent_ranks(everything)
    _leave_out_bystanders(rule, found, everything)
    # The end of the node also ended its other ranks.
    is_whole_node = rule.first_death and found["node"]
    is_named = found["rank"] or found["local_rank"] or is_whole_node
    if not is_named and rule.kind not in OF_PEERS | _OF_NO_PROCESS:
        of_exit = _of_the_only_exit(everything)
        found |= {name: of_exit.get(name, set()) for name in ("rank", "local_rank")}
        is_sure = rule.action != "exclude_and_restart"  # an exit is too weak to exclude a node
        if not found["node"] and is_sure and rule.kind in _ENDS_ON_A_HOST and rule.restart_helps:
            found["node"] = of_exit.get("node", set())
    if not found["rank"] and rule.kind in OF_PEERS:
        found["rank"] = _died_first(everything)
    if not found["node"] and (rule.kind in OF_PEERS or _host_may_be_at_fault(rule)):
        found["node"] = _nodes_beside(root.first, everything)
    if not found["node"]:
        named = (names().names_in(event.rule.kind, event.text) for event in alike)
        found["node"] = {one["node_id"] for one in named if "node_id" in one}
    return {
        name: known[0] if len(known) == 1 else known
        for name, values in found.items()
        if (known := sorted(values)[:_SCOPE_LIMIT])
    }


def _host_may_be_at_fault(rule: Rule) -> bool:
    """Return True if the host that printed a line of `rule` may be at fault.

    If a restart does not help, the host is not at fault, except for full memory or storage.
    """
    return rule.kind in _OF_HOSTS and (rule.restart_helps or rule.kind in _OF_ITS_OWN_STATE)


def _leave_out_bystanders(
    rule: Rule, found: dict[str, set[Any]], everything: Iterable[Event]
) -> None:
    """Remove from `found` what identifies no suspect.

    For example, all ranks of the job are no suspects, and neither are peers that differ from report
    to report.
    """
    logs = {id(event.log): event.log for event in everything}
    known = {rank for log in logs.values() for rank in log.ranks}
    for name, everybody in (("rank", known), ("local_rank", set())):
        those = found[name]
        if len(those) > 1 and those >= everybody and those == set(range(max(those) + 1)):
            found[name] = set()
    if rule.kind in OF_PEERS and len(found["node"]) > 1:
        # If each rank reports a different peer, a single fault that no rank names ended all of
        # them.
        found["node"] = set()


def _nodes_beside(root: Event, everything: Iterable[Event]) -> set[str]:
    """Return the node that lines near the root name; an empty set unless there is exactly one.

    Ray and MPI report a failure in several lines.
    """
    beside = (
        event
        for event in everything
        if event.log is root.log
        and event.rule.kind == "teardown"
        and abs(event.log_line - root.log_line) <= _BESIDE_LINES
    )
    nodes: set[str] = _named(beside, {})["node"]
    return nodes if len(nodes) == 1 else set()


def _died_first(everything: Iterable[Event]) -> set[Any]:
    """Return the rank that ended first, whose peers report the loss; an empty set if unclear."""
    dead = (one for one in everything if one.rule.first_death and not one.recovered)
    ranks: set[Any] = _named(dead, {})["rank"]
    return ranks if len(ranks) == 1 else set()


def _of_the_only_exit(everything: Iterable[Event]) -> dict[str, set[Any]]:
    """Return the only process or node whose end a launcher reports; empty if there are several.

    This evidence is too weak to exclude a node.
    """
    ends = [
        event
        for event in everything
        if event.rule.kind in ("exit", "death", "crash") and not event.recovered
    ]
    # These rules report a single process; the lines of other rules list all processes that ended.
    with_pid = [event for event in ends if "pid" in event.captures]
    named = _named(with_pid or ends, {})
    only = {name: values for name, values in named.items() if len(values) == 1}
    if "rank" not in only and "local_rank" in only:
        both = (one.captures for one in ends if {"rank", "local_rank"} <= one.captures.keys())
        of_it = {int(one["rank"]) for one in both if int(one["local_rank"]) in only["local_rank"]}
        only |= {"rank": of_it} if len(of_it) == 1 else {}
    return only


def _named(events: Iterable[Event], ranks_by_pid: dict[str, int]) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {
        name: set() for name in ("rank", "local_rank", "node", "gpu", "link")
    }
    for event in events:
        captures = {**names().names_in(event.rule.kind, event.text), **event.captures}
        node = "" if event.rule.kind == "exception" else captures.get("node", "").rstrip(".")
        node = "" if _NOBODY.search(node) else node
        # A rank that reports on a peer or another host is not at fault itself.
        of_others = event.rule.kind in OF_PEERS or bool(
            node and event.rule.kind in ("fabric", "node")
        )
        rank = None if of_others and "rank" not in captures else rank_of(event)
        rank = int(captures["rank"]) if rank is None and "rank" in captures else rank
        found["rank"].add(ranks_by_pid.get(captures.get("pid", "")) if rank is None else rank)
        local_rank = None if of_others else event.local_rank
        found["local_rank"].add(
            int(captures["local_rank"]) if "local_rank" in captures else local_rank
        )
        found["rank"] |= {int(one) for one in _DIGITS.findall(captures.get("ranks", ""))}
        own = None if event.node is None or _NOBODY.search(event.node) else event.node
        # A local rank without a host identifies no process if the job has several hosts.
        place = _host_may_be_at_fault(event.rule) or (local_rank is not None and rank is None)
        found["node"].add(node or (own if place and not of_others else None))
        found["gpu"].add(captures["gpu"].lower() if "gpu" in captures else None)
        found["link"].add(int(captures["link"]) if "link" in captures else None)
    return {name: values - {None} for name, values in found.items()}


def absent_ranks(events: Iterable[Event]) -> set[int]:
    """Return the few ranks that reported no timeout of a collective although all other ranks did.

    If all ranks reported the timeout, return the ranks that had enqueued fewer collectives than the
    others.
    """
    reports = [
        event for event in events if event.rule.kind == "collective_timeout" and not event.recovered
    ]
    reporting: set[int] = set()
    known: set[int] = set()
    for event in reports:
        by_rank = event.log.reporters.get(event.rule.id, {})
        reporting |= by_rank.keys()
        known |= event.log.ranks
        # Numbers are compared only within a rule, since some rules count enqueued collectives, and
        # others count collectives that timed out.
        enqueued = {rank: work for rank, work in by_rank.items() if work is not None}
        if len(set(enqueued.values())) > 1:
            behind = {rank for rank, work in enqueued.items() if work == min(enqueued.values())}
            if _few(behind, enqueued):
                return behind
    if len(reporting) < 2:
        return set()
    # A report is expected from all ranks up to the highest one that reports. If all of these
    # report, it is expected from all ranks that have printed a line.
    absent = set(range(max(reporting) + 1)) - reporting or known - reporting
    return absent if _few(absent, reporting) else set()


def _few(ranks: Collection[int], of: Collection[int]) -> bool:
    return len(ranks) <= max(1, _ABSENT_SHARE * len(of))


class Names:
    """The patterns of `names.yaml`, which find the names of ranks, nodes, GPUs and links."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.examples = [(one["id"], one["kinds"], one["example"], one["tells"]) for one in given]
        self._by_kind: dict[str, list[Any]] = {}
        for one in given:
            pattern = re2.compile(one["pattern"])
            for kind in one["kinds"]:
                self._by_kind.setdefault(kind, []).append(pattern)

    def names_in(self, kind: str, text: str) -> dict[str, str]:
        """Return the names in the text of an event of `kind`, by group; the first match counts."""
        found: dict[str, str] = {}
        for pattern in self._by_kind.get(kind, ()):
            if match := pattern.search(text):
                for name, value in match.groupdict().items():
                    found.setdefault(name, value)
        return found


@functools.cache
def names() -> Names:
    """Return the packaged patterns."""
    text = (resources.files("holdfast.diagnose.rules") / "names.yaml").read_text("utf-8")
    return Names(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
