"""Events to causes: the least-cost explanation of all that was seen, and what else it might have been.

An event either begins the failure, or something that was also seen brought it about (`causes.yaml`), or it had
nothing to do with it. Each of these has a cost, and so has the way from an event to the end of the job. For each
event that may have begun it all, the cheapest explanation of everything is summed up; the event with the least sum
is the root, and the others' sums say how much doubt is left. Neither the order of lines nor of files plays a part:
a cascade may be printed before its cause.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from holdfast.diagnose.explain.diagnosis import mask_varying
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.logs.tracebacks import is_exception
from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.rules import ENDING

END: Final = -1
"""The end of the job, which every explanation must reach."""
NO_WAY: Final = math.inf
_CLUSTERS_LIMIT: Final = 48
_UNKNOWN_SCOPE: Final = 0.3
"""One of the two events does not say where it was."""
_ELSEWHERE: Final = 2.5
"""An edge within a process, between events of two processes: it happens (one host, one GPU), seldom."""
_SURVIVED: Final = 4.5
"""The process, or the job for long enough, made progress after it."""
_SURVIVED_IN_PRINT: Final = 2.0
"""So it seems, but it is the last word of the rank that ended first: unflushed steps are printed below it."""
_BUFFERED_LINES: Final = 200
"""What stdio keeps back of one process (8 KiB), in lines, and what its launcher says on ending."""
_SUPERSEDED: Final = 5.0
"""Another line of the same chain of tracebacks states the root, or Python went on after it."""
_BARE_EXCEPTION: Final = 0.4
"""A line that looks like an exception but ends no traceback may have been logged and handled."""
_DOUBTED_RULE: Final = 1.0
"""For a rule that is never right about the reason; in proportion below."""
_AFTER_A_DEATH: Final = 3.0
"""An error of another rank than the one that something killed first came after that death."""
_AFTER_A_SILENT_END: Final = 1.5
"""A lost peer, told by another rank than the one that ended first and said nothing."""
_ENDED_FIRST: Final = -0.2
"""Little: two ranks' exits a few milliseconds apart may be seen in either order."""
_OUTSIDE_ANY_RANK: Final = frozenset(
    {
        "gpu_memory",
        "gpu_link",
        "gpu_lost",
        "node",
        "fabric",
        "host_memory",
        "frozen",
        "disk",
        "scheduler",
    }
)
"""Another rank's death says nothing against these."""
_ENDS: Final = frozenset({"death", "crash", "frozen", "exit", "host_memory", "scheduler"})
"""What is said of the end of a process."""
OF_PEERS: Final = frozenset({"peer_lost", "store_lost", "collective_timeout"})
"""What a process tells of others."""


@dataclass(eq=False, kw_only=True)
class Cluster:
    """Events that say the same: one rule, one text but for numbers, whatever their rank."""

    events: list[Event]
    ranks: frozenset[int]
    alone: float
    left: float

    @property
    def first(self) -> Event:
        """The event that stands for all."""
        return self.events[0]


@dataclass(frozen=True, kw_only=True)
class Reckoning:
    """What it costs to take one candidate for the root, in nats; the sum is what candidates are compared by."""

    alone: float
    """That it began by itself."""
    end: float
    """Its way to the end of the job."""
    others: Sequence[tuple[Cluster, Literal["follows", "unrelated", "by itself"], float]]
    """Each other cluster: it follows from the candidate, has nothing to do with it, or is a fault of its own."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.alone + self.end + sum(cost for _, _, cost in self.others)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A root, and how it compares with the other candidates."""

    ranked: Sequence[Cluster] = ()
    """Candidates for the root, the likeliest first; empty where nothing was seen."""
    shares: Sequence[float] = ()
    """Of each candidate: its part of the likelihood, 0 to 1."""
    reckonings: Sequence[Reckoning] = ()
    """Of each candidate: how its cost comes about."""
    caused: frozenset[int] = field(default_factory=frozenset)
    """Ids of the clusters that the root brought about."""


@dataclass(frozen=True)
class FirstEnd:
    """The rank that ended first, as far as someone saw it."""

    rank: int | None
    certain: bool
    """Something that no peer can cause ended it."""
    last_said: int = -1
    """Where in its log stands the last error of its own that it did not survive: a line that tells of peers, or an
    exception."""
    silent: bool = False
    """Nothing in its own log says why: then what its peers say of a lost connection follows from its end."""
    rule_id: str = ""


def explain(events: Sequence[Event], first: FirstEnd) -> Explanation:
    """Find the least-cost explanation of `events`."""
    clusters = _clusters([one for one in events if one.rule.kind != ENDING], first)
    candidates = [index for index, one in enumerate(clusters) if _may_begin(one, first)]
    if not candidates:
        return Explanation()
    direct = _direct_costs(clusters)
    ways = {index: _ways_from(index, direct) for index in candidates}
    reckonings = {root: _reckon(root, clusters, ways[root]) for root in candidates}
    totals = {root: one.total for root, one in reckonings.items()}
    ranked = sorted(candidates, key=lambda index: (totals[index], *_place(clusters[index].first)))
    least = totals[ranked[0]]
    weights = [math.exp(least - totals[index]) for index in ranked]
    root = ranked[0]
    caused = [
        index
        for index, one in enumerate(clusters)
        if index != root and ways[root][index] < one.left
    ]
    return Explanation(
        ranked=[clusters[index] for index in ranked],
        shares=[weight / sum(weights) for weight in weights],
        reckonings=[reckonings[index] for index in ranked],
        caused=frozenset(id(clusters[index]) for index in caused),
    )


def _reckon(root: int, clusters: Sequence[Cluster], ways: dict[int, float]) -> Reckoning:
    others = []
    for index, one in enumerate(clusters):
        if index != root:
            costs: dict[Literal["follows", "unrelated", "by itself"], float]
            costs = {
                "follows": ways[index],
                "unrelated": one.left,
                "by itself": one.alone + _DOUBTED_RULE,
            }
            how = min(costs, key=lambda word: costs[word])
            others.append((one, how, costs[how]))
    return Reckoning(alone=clusters[root].alone, end=ways[END], others=others)


def _may_begin(cluster: Cluster, first: FirstEnd) -> bool:
    event = cluster.first
    if event.rule.kind == "teardown" or event.demoted:
        return False
    return not event.recovered or _is_last_word(event, first)


def _is_last_word(event: Event, first: FirstEnd) -> bool:
    """Whether it may be the last that its process said, though steps stand below it.

    A program whose output is buffered prints its traceback first and the last steps on leaving: a few kilobytes.
    """
    rank = rank_of(event)
    if first.rank is None or rank not in (None, first.rank) or event.lines_below > _BUFFERED_LINES:
        return False
    if event.log_line < first.last_said:
        return False
    # Others' steps may be printed below it where the output of ranks was put together one after another.
    return event.whole_traceback or (rank is not None and not event.own_progress)


def rank_of(event: Event) -> int | None:
    """The rank that an event is about: the one its text names, else the one that printed it."""
    return int(event.captures["rank"]) if "rank" in event.captures else event.rank


def first_end(events: Iterable[Event]) -> FirstEnd:
    """The rank that ended first, where a supervisor, launcher or kernel said so."""
    events = [one for one in events if one.rule.kind != ENDING]
    seen = [
        FirstEnd(rank=rank, certain=event.rule.first_death, rule_id=event.rule.id)
        for event in events
        if "pid" in event.captures
        and (rank := _ended(event)) is not None
        and event.rule.kind in _ENDS
        and not event.recovered
    ]
    first = max(
        seen,
        key=lambda one: (one.certain, -(one.rank or 0)),
        default=FirstEnd(rank=None, certain=False),
    )
    its = [
        event for event in events if rank_of(event) == first.rank and "pid" not in event.captures
    ]
    later = (
        e.log_line
        for e in its
        if e.rule.kind in OF_PEERS | {"exception"} and not (e.recovered or e.demoted)
    )
    return replace(first, silent=not its, last_said=max(later, default=-1))


def _ended(event: Event) -> int | None:
    rank = rank_of(
        event
    )  # a launcher that names the local rank only has one node, as far as the log goes
    return (
        int(event.captures["local_rank"])
        if rank is None and "local_rank" in event.captures
        else rank
    )


def _place(event: Event) -> tuple[int, str, int]:
    # By name and number at last: any order of the files gives the same. Cited lines go before a bare word.
    return (int(event.line == 0), event.file, event.line)


def _clusters(events: Iterable[Event], first: FirstEnd) -> list[Cluster]:
    groups: dict[tuple[str, str, bool, bool], list[Event]] = {}
    for event in sorted(events, key=lambda one: (-one.rule.confidence, *_place(one))):
        key = (event.rule.id, mask_varying(event.text.strip()), event.recovered, event.demoted)
        groups.setdefault(key, []).append(event)
    clusters = []
    for group in groups.values():
        ranks = frozenset(rank for event in group if (rank := rank_of(event)) is not None)
        alone = min(_alone(event, first) for event in group)
        kind = kinds()[group[0].rule.kind]
        left = 0.05 if group[0].recovered or group[0].demoted else kind.left
        group.sort(key=lambda event: (_alone(event, first), *_place(event)))
        clusters.append(Cluster(events=group, ranks=ranks, alone=alone, left=left))
    clusters.sort(key=lambda one: (one.alone, *_place(one.first)))
    return clusters[:_CLUSTERS_LIMIT]


def _alone(event: Event, first: FirstEnd) -> float:
    rule = event.rule
    cost = kinds()[rule.kind].alone if rule.alone is None else rule.alone
    cost += _DOUBTED_RULE * (1.0 - rule.confidence)
    rank = rank_of(event)
    if event.demoted:
        cost += _SUPERSEDED
    elif event.recovered:
        cost += _SURVIVED_IN_PRINT if _is_last_word(event, first) else _SURVIVED
    if is_bare(event):
        cost += _BARE_EXCEPTION
    if first.rank is not None and rank is not None:
        if rank == first.rank:
            cost += _ENDED_FIRST
        elif first.silent and rule.kind in OF_PEERS:
            cost += _AFTER_A_SILENT_END
        elif first.certain and rule.kind not in _OUTSIDE_ANY_RANK:
            cost += _AFTER_A_DEATH
    return cost


def is_bare(event: Event) -> bool:
    """Whether the line looks like an exception, and no traceback led to it."""
    return (
        not event.whole_traceback
        and event.rule.id != "python-syntax-error"
        and is_exception(event.text)
    )


def _direct_costs(clusters: Sequence[Cluster]) -> list[dict[int, float]]:
    """Of each cluster: what it can bring about by itself, with the cost; `END` among them."""
    direct: list[dict[int, float]] = []
    for index, cause in enumerate(clusters):
        kind = kinds()[cause.first.rule.kind]
        costs = {END: kind.ends}
        for other, effect in enumerate(clusters):
            edge = kind.brings.get(effect.first.rule.kind)
            if edge is not None and other != index:
                costs[other] = edge[1] + _scope_cost(edge[0], cause.ranks, effect.ranks)
        direct.append(costs)
    return direct


def _scope_cost(where: str, cause: frozenset[int], effect: frozenset[int]) -> float:
    if where == "any":
        return 0.0
    if not cause or not effect:
        return _UNKNOWN_SCOPE
    fits = bool(cause & effect) if where == "same" else len(cause | effect) > 1
    return 0.0 if fits else _ELSEWHERE


def _ways_from(root: int, direct: Sequence[dict[int, float]]) -> dict[int, float]:
    """The cheapest way from `root` to every cluster and to the end (Dijkstra; there are a few dozen)."""
    cost = dict.fromkeys([END, *range(len(direct))], NO_WAY)
    cost[root] = 0.0
    open_ = set(range(len(direct)))
    while open_:
        nearest = min(open_, key=lambda index: cost[index])
        open_.discard(nearest)
        if cost[nearest] == NO_WAY:
            break
        for index, step in direct[nearest].items():
            cost[index] = min(cost[index], cost[nearest] + step)
    return cost
