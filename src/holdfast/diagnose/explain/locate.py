"""Who is at fault: the ranks, nodes, GPUs and links that the lines of the root name, or leave out."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import re2
import yaml

from holdfast.diagnose.explain.diagnosis import mask_varying
from holdfast.diagnose.explain.explain import OF_PEERS, Cluster, rank_of
from holdfast.diagnose.explain.scan import Event

_SCOPE_LIMIT: Final = 64
_DIGITS: Final = re2.compile(r"\d+")
_CASELESS: Final = re2.Options()
_CASELESS.case_sensitive = False
_ABSENT_SHARE: Final = 0.34
"""More of the ranks than this without a word say nothing about any of them."""
_BESIDE_LINES: Final = 10
_NOBODY: Final = re2.compile(
    r"^(?:127\.|::1$|localhost|0\.0\.0\.0$|169\.254\.|172\.17\.|fe80|unknown|none|\?|-?$)",
    _CASELESS,
)
"""Names that name no node: loopback, link-local and container addresses."""


def scope_of(root: Cluster, same: Sequence[Event], everything: Sequence[Event]) -> dict[str, Any]:
    """`rank`, `local_rank`, `node`, `gpu`, `link` of the fault: each a value, a list, or absent."""
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
        for event in alike:  # of many that say the same, not all are kept
            found["rank"] |= (
                set() if rule.kind in OF_PEERS else event.log.reporters.get(rule.id, {}).keys()
            )
    if rule.kind == "collective_timeout":
        found["rank"] |= absent_ranks(everything)
    is_whole_node = rule.first_death and found["node"]  # other ranks were ended because of that
    is_named = found["rank"] or found["local_rank"] or is_whole_node
    if not is_named and rule.kind not in OF_PEERS:
        of_exit = _of_the_only_exit(everything)
        found |= {name: of_exit.get(name, set()) for name in ("rank", "local_rank")}
        if not found["node"] and rule.action != "exclude_and_restart":
            found["node"] = of_exit.get("node", set())
    if not found["node"]:
        found["node"] = _nodes_beside(root.first, everything)
    if not found["node"]:
        told = (names().told(event.rule.kind, event.text) for event in alike)
        found["node"] = {one["node_id"] for one in told if "node_id" in one}
    return {
        name: known[0] if len(known) == 1 else known
        for name, values in found.items()
        if (known := sorted(values)[:_SCOPE_LIMIT])
    }


def _nodes_beside(root: Event, everything: Iterable[Event]) -> set[str]:
    """The one node that lines around the root name: of what Ray and MPI say in several lines."""
    beside = (
        event
        for event in everything
        if event.log is root.log
        and event.rule.kind == "teardown"
        and abs(event.log_line - root.log_line) <= _BESIDE_LINES
    )
    nodes: set[str] = _named(beside, {})["node"]
    return nodes if len(nodes) == 1 else set()


def _of_the_only_exit(everything: Iterable[Event]) -> dict[str, set[Any]]:
    """The one process, or the one node, that launchers say ended with an error; not sure enough to take a node out."""
    ends = [
        event
        for event in everything
        if event.rule.kind in ("exit", "death", "crash") and not event.recovered
    ]
    told = [
        event for event in ends if "pid" in event.captures
    ]  # of a process; other lines list all that ended
    named = _named(told or ends, {})
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
        captures = {**names().told(event.rule.kind, event.text), **event.captures}
        node = captures.get("node", "").rstrip(".")
        node = "" if _NOBODY.search(node) else node
        # Who tells of a peer or of another host is not the rank at fault.
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
        found["node"].add(node or (None if of_others else own))
        found["gpu"].add(captures["gpu"].lower() if "gpu" in captures else None)
        found["link"].add(int(captures["link"]) if "link" in captures else None)
    return {name: values - {None} for name, values in found.items()}


def absent_ranks(events: Iterable[Event]) -> set[int]:
    """The few ranks that did not report a timed-out collective that all the others report: these did not come to it.

    Among those that report it, the ones that had enqueued less than the rest were behind.
    """
    reports = [
        event for event in events if event.rule.kind == "collective_timeout" and not event.recovered
    ]
    heard: set[int] = set()
    known: set[int] = set()
    for event in reports:
        by_rank = event.log.reporters.get(event.rule.id, {})
        heard |= by_rank.keys()
        known |= event.log.ranks
        # Within a rule: two rules count differently, what is enqueued and what timed out.
        enqueued = {rank: work for rank, work in by_rank.items() if work is not None}
        if len(set(enqueued.values())) > 1:
            behind = {rank for rank, work in enqueued.items() if work == min(enqueued.values())}
            if _few(behind, enqueued):
                return behind
    if len(heard) < 2:
        return set()
    # Up to the highest that reports it; or, where all these do, of all ranks that ever printed something.
    absent = set(range(max(heard) + 1)) - heard or known - heard
    return absent if _few(absent, heard) else set()


def _few(ranks: Collection[int], of: Collection[int]) -> bool:
    return len(ranks) <= max(1, _ABSENT_SHARE * len(of))


class Names:
    """The patterns of `names.yaml`."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.examples = [(one["id"], one["kinds"], one["example"], one["tells"]) for one in given]
        self._by_kind: dict[str, list[Any]] = {}
        for one in given:
            pattern = re2.compile(one["pattern"])
            for kind in one["kinds"]:
                self._by_kind.setdefault(kind, []).append(pattern)

    def told(self, kind: str, text: str) -> dict[str, str]:
        """What `text`, of an event of `kind`, says: the groups of `names.yaml`; of two, the first pattern's."""
        found: dict[str, str] = {}
        for pattern in self._by_kind.get(kind, ()):
            if match := pattern.search(text):
                for name, value in match.groupdict().items():
                    found.setdefault(name, value)
        return found


@functools.cache
def names() -> Names:
    """The patterns that come with Holdfast."""
    text = (resources.files("holdfast.diagnose.rules") / "names.yaml").read_text("utf-8")
    return Names(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
