"""Find the least-cost explanation of all events, and its rivals.

Each event has one of three explanations: the event began the failure, another event brought it
about (`causes.yaml`), or the event is unrelated. Each explanation has a cost, and so has the end of
the job. For each candidate root, the costs of the cheapest explanations of all events are added up.
The candidate with the least sum is the root; the other sums measure the doubt.

An explanation is an arborescence: each event pays only for its direct cause, so a cause of many
events is paid for once. The order of lines and files has no influence, since a cascade may be
printed before its cause.
"""

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from holdfast.diagnose.explain.arborescence import least_parents
from holdfast.diagnose.explain.diagnosis import mask_varying
from holdfast.diagnose.explain.life import is_habitual
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.explain.timing import (
    NOT_WHEN_THE_WAIT_BEGAN,
    Span,
    began_wait,
    clocks_of,
    follows_cost,
    span_of,
)
from holdfast.diagnose.logs.tracebacks import is_exception
from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.rules import ENDING
from holdfast.diagnose.rules.taxonomy import CATEGORIES

_CLUSTERS_LIMIT: Final = 48
_UNKNOWN_SCOPE: Final = 0.3
"""The cost if one of the two events has no known location."""
_ELSEWHERE: Final = 2.5
"""The cost of an edge within a process between events of two processes: possible (one host, one
GPU), but rare."""
_SURVIVED: Final = 4.5
"""The cost of an event after which the process, or the job for long enough, made progress."""
_SURVIVED_IN_PRINT: Final = 2.0
"""The lower cost if the survived event is the last line of the rank that ended first: unflushed
steps may be printed below it."""
_BUFFERED_LINES: Final = 200
"""The lines in one process's stdio buffer (8 KiB), and in its launcher's report of the end."""
_SUPERSEDED: Final = 5.0
"""The cost if another line of the same chain of tracebacks states the root, or Python continued
after this one."""
_HABITUAL: Final = 4.5
"""The cost if the job survived the same error several times before."""
_OUTLIVED: Final = 1.5
"""The cost if the process logged many lines after the event, and then another error."""
_OUTLIVED_BY_SOMEBODY: Final = 0.3
"""The lower cost if the log names no processes: another process may have raised the other error."""
_IN_A_THREAD: Final = 1.0
"""The cost if the exception ended only a thread, and the program continued."""
_REPORT: Final = 1.5
"""The cost if the job's own text introduces or quotes the line: the line may be about another
program."""
_BARE_EXCEPTION: Final = 0.4
"""The cost of an exception line without a traceback: the exception may have been logged and
handled."""
_DOUBTED_RULE: Final = 1.0
"""The cost of a rule that is never correct about the reason; in proportion for other rules."""
_AFTER_A_DEATH: Final = 3.0
"""The cost of an error of another rank after the first rank was certainly killed."""
_AFTER_A_SILENT_END: Final = 1.8
"""The cost of a lost peer that is reported by another rank than the silent one that ended first."""
_ENDED_FIRST: Final = -0.2
"""A small bonus: two exits a few milliseconds apart may be observed in either order."""
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
"""Kinds that another rank's death does not make less likely."""
_ENDS: Final = frozenset({"death", "crash", "frozen", "exit", "host_memory", "scheduler"})
"""Kinds that report the end of a process."""
OF_PEERS: Final = frozenset({"peer_lost", "store_lost", "collective_timeout"})
"""Kinds in which a process reports its peers."""
_REPEATED: Final = OF_PEERS | {"exit", "teardown"}
"""Kinds of which any number of events, in any words, is one consequence."""
_OF_A_PROGRAM: Final = frozenset(
    {
        *(reason for reason, category in CATEGORIES.items() if category == "Script"),
        *("AttributeError", "AssertionError", "ValueError", "ZeroDivisionError"),
        *("ModelLoadingError", "DatasetLoadingError"),
    }
) - {"OSError", "CalledProcessError"}
"""Reasons that originate in a program. A lost connection raises connection errors, not these."""
_NO_WORD_OF_A_PEER: Final = 1.5
"""The cost of an error that a lost peer caused, though the error's text does not mention a peer."""
_SURVIVED_LEFT: Final = 0.05
"""The cost to leave out a line that was survived or superseded."""
_BROKEN_LOSS: Final = frozenset({"observer-not-finite", "observer-spike"})
"""The supervisor's rules for a broken loss: all ranks still trained when the supervisor found the
loss broken."""
_OF_A_STOPPED_JOB: Final = OF_PEERS | {
    "worker_lost",
    "exception",
    "crash",
    "death",
    "exit",
    "suspect",
}
"""Kinds that processes log when the supervisor kills their job. Such an event follows from the
broken loss, or was survived before."""


@dataclass(eq=False, kw_only=True)
class Cluster:
    """The events of any ranks with one rule and one text, apart from numbers.

    For kinds in `_REPEATED` the texts may differ.
    """

    events: list[Event]
    ranks: frozenset[int]
    alone: float
    left: float
    span: Span | None = None

    @property
    def first(self) -> Event:
        """Return the event that represents the cluster."""
        return self.events[0]


How: TypeAlias = Literal["follows", "unrelated", "by itself"]
"""A cluster follows from the candidate, is unrelated to the end, or is a fault of its own."""


@dataclass(frozen=True, kw_only=True)
class Reckoning:
    """The cost of one candidate as the root, in nats."""

    alone: float
    """The cost that the candidate began by itself."""
    end: float
    """The cost that the candidate or a consequence ended the job."""
    others: Sequence[tuple[Cluster, How, float]]
    """Each other cluster, its relation to the candidate, and the cost of this relation."""

    @property
    def total(self) -> float:
        """Return the sum by which candidates are compared."""
        return self.alone + self.end + sum(cost for _, _, cost in self.others)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The root and its rivals."""

    ranked: Sequence[Cluster] = ()
    """Candidates for the root, the likeliest first; empty if there was no event."""
    shares: Sequence[float] = ()
    """The share of the likelihood of each candidate, 0 to 1."""
    reckonings: Sequence[Reckoning] = ()
    """The costs of each candidate."""
    caused: frozenset[int] = field(default_factory=frozenset)
    """Ids of the clusters that the root brought about."""

    @functools.cached_property
    def by_reason(self) -> Mapping[str, tuple[float, Cluster]]:
        """Return for each reason the sum of its candidates' shares, and its likeliest candidate."""
        found: dict[str, tuple[float, Cluster]] = {}
        for cluster, share in zip(self.ranked, self.shares, strict=True):
            before, likeliest = found.get(cluster.first.rule.reason, (0.0, cluster))
            found[cluster.first.rule.reason] = (before + share, likeliest)
        return found


@dataclass(frozen=True)
class FirstEnd:
    """The rank that ended first, as observed."""

    rank: int | None
    certain: bool
    """True if the cause of the end cannot be a peer."""
    last_said: int = -1
    """The log line of the rank's last error that was not survived, either an exception or a report
    of peers."""
    silent: bool = False
    """True if the rank's own log has no error. The lost connections that peers report then follow
    from its end."""
    rule_id: str = ""
    nobody: bool = False
    """True if a broken loss ended the job, so that no rank ended by itself."""


def explain(events: Sequence[Event], first: FirstEnd) -> Explanation:
    """Find the least-cost explanation of `events`.

    Args:
        events: all events that may be related to the failure.
        first: the rank that ended first.
    """
    clusters = _clusters([one for one in events if one.rule.kind != ENDING], first)
    candidates = [index for index, one in enumerate(clusters) if _may_begin(one, first)]
    if not candidates:
        return Explanation()
    edges = _edges(clusters)
    reckonings = {root: _reckon(root, clusters, edges) for root in candidates}
    totals = {root: one.total for root, one in reckonings.items()}
    ranked = sorted(candidates, key=lambda index: (totals[index], *_place(clusters[index].first)))
    least = totals[ranked[0]]
    weights = [math.exp(least - totals[index]) for index in ranked]
    return Explanation(
        ranked=[clusters[index] for index in ranked],
        shares=[weight / sum(weights) for weight in weights],
        reckonings=[reckonings[index] for index in ranked],
        caused=frozenset(
            id(one) for one, how, _ in reckonings[ranked[0]].others if how == "follows"
        ),
    )


def _reckon(
    root: int, clusters: Sequence[Cluster], edges: Sequence[Mapping[int, float]]
) -> Reckoning:
    """Find the cheapest explanation in which `root` began the failure.

    A line that was survived or superseded has no consequences.
    """
    inside = {index for index, one in enumerate(clusters) if one.left > _SURVIVED_LEFT}
    reached = _reached(root, inside, edges)
    incoming = {
        index: {cause: cost for cause, cost in edges[index].items() if cause in reached}
        for index in sorted(reached - {root})
    }
    parents = least_parents(root, incoming)
    costs = {index: incoming[index][parent] for index, parent in parents.items()}
    apart = [_apart(one) for one in clusters]
    following = _worth_explaining(root, parents, costs, [cost for cost, _ in apart])
    return Reckoning(
        alone=clusters[root].alone,
        end=min(kinds()[clusters[index].first.rule.kind].ends for index in {root, *following}),
        others=[
            (one, "follows", costs[index]) if index in following else (one, how, cost)
            for index, (one, (cost, how)) in enumerate(zip(clusters, apart, strict=True))
            if index != root
        ],
    )


def _apart(cluster: Cluster) -> tuple[float, How]:
    """Return the cost if `cluster` does not follow from the root, and its relation then."""
    by_itself = cluster.alone + _DOUBTED_RULE
    return (by_itself, "by itself") if by_itself < cluster.left else (cluster.left, "unrelated")


def _reached(root: int, inside: Set[int], edges: Sequence[Mapping[int, float]]) -> set[int]:
    """Return `root` and all its possible consequences, at any cost."""
    reached = {root}
    while more := {
        index for index in inside - reached if not reached.isdisjoint(edges[index].keys())
    }:
        reached |= more
    return reached


def _worth_explaining(
    root: int, parents: Mapping[int, int], costs: Mapping[int, float], apart: Sequence[float]
) -> set[int]:
    """Return the consequences of `root`, without branches that are cheaper as unrelated."""
    children: dict[int, list[int]] = {}
    for index, parent in parents.items():
        children.setdefault(parent, []).append(index)

    def branch(index: int) -> tuple[float, float, set[int]]:
        """Return the cost of a branch, its cost as unrelated, and the nodes that stay."""
        below = [branch(child) for child in children.get(index, ())]
        explained = costs[index] + sum(cost for cost, _, _ in below)
        unrelated = apart[index] + sum(cost for _, cost, _ in below)
        if unrelated < explained:
            return unrelated, unrelated, set()
        return explained, unrelated, {index}.union(*(stay for _, _, stay in below))

    return set().union(*(branch(child)[2] for child in children.get(root, ())))


def _may_begin(cluster: Cluster, first: FirstEnd) -> bool:
    event = cluster.first
    if event.rule.kind == "teardown" or event.demoted or event.of_generated_program:
        return False
    if first.nobody and event.rule.kind in _OF_A_STOPPED_JOB and event.rule.id not in _BROKEN_LOSS:
        return False
    return not event.recovered or _is_last_word(event, first)


def _is_last_word(event: Event, first: FirstEnd) -> bool:
    """Return True if the event may be its process's last line, though steps are printed below it.

    A program with buffered output prints its traceback first, and the last few kilobytes of steps
    on exit.
    """
    rank = rank_of(event)
    if first.rank is None or rank not in (None, first.rank) or event.lines_below > _BUFFERED_LINES:
        return False
    if event.log_line < first.last_said:
        return False
    # If the ranks' outputs were concatenated, other ranks' steps are printed below.
    return event.whole_traceback or (rank is not None and not event.own_progress)


def rank_of(event: Event) -> int | None:
    """Return the rank that the event's text names, else the rank that printed the event."""
    return int(event.captures["rank"]) if "rank" in event.captures else event.rank


def first_end(events: Iterable[Event]) -> FirstEnd:
    """Return the rank that ended first according to a supervisor, launcher or kernel."""
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
    return replace(
        first,
        silent=not its,
        last_said=max(later, default=-1),
        nobody=any(event.rule.id in _BROKEN_LOSS for event in events),
    )


def _ended(event: Event) -> int | None:
    rank = rank_of(event)
    # A launcher that names only the local rank has one node, as far as the log shows.
    return (
        int(event.captures["local_rank"])
        if rank is None and "local_rank" in event.captures
        else rank
    )


def _place(event: Event) -> tuple[int, str, int]:
    # Ties are broken by name and number, so the order of files has no influence. Lines that can be
    # cited come before observations.
    return (int(event.line == 0), event.file, event.line)


def _clusters(events: Iterable[Event], first: FirstEnd) -> list[Cluster]:
    groups: dict[tuple[Hashable, ...], list[Event]] = {}
    for event in sorted(events, key=lambda one: (-one.rule.confidence, *_place(one))):
        text = "" if event.rule.kind in _REPEATED else mask_varying(event.text.strip())
        whose = (event.of_generated_program, event.is_report)
        key = (event.rule.id, text, event.recovered, event.demoted, event.caught, *whose)
        groups.setdefault(key, []).append(event)
    clocks = clocks_of(event for group in groups.values() for event in group)
    clusters = []
    for group in groups.values():
        ranks = frozenset(rank for event in group if (rank := rank_of(event)) is not None)
        kind = kinds()[group[0].rule.kind]
        is_past = all(
            event.recovered
            or event.demoted
            or event.caught == "the interpreter"
            or is_habitual(event.survived_before)
            or event.of_generated_program
            for event in group
        )
        clusters.append(
            Cluster(
                events=_each_wording_first(
                    sorted(group, key=lambda event: (_alone(event, first), *_place(event)))
                ),
                ranks=ranks,
                alone=min(_alone(event, first) for event in group),
                left=_SURVIVED_LEFT if is_past else kind.left,
                span=span_of(group, clocks),
            )
        )
    clusters.sort(key=lambda one: (one.alone, *_place(one.first)))
    return clusters[:_CLUSTERS_LIMIT]


def _each_wording_first(events: Sequence[Event]) -> list[Event]:
    """Reorder `events`: one event of each wording comes first.

    Three lines in different words carry more evidence than three lines in the same words.
    """
    of_wording: dict[str, int] = {}
    turns = []
    for event in events:
        text = mask_varying(event.text.strip())
        turns.append(of_wording.setdefault(text, 0))
        of_wording[text] += 1
    return [event for _, event in sorted(zip(turns, events, strict=True), key=lambda one: one[0])]


def _alone(event: Event, first: FirstEnd) -> float:
    rule = event.rule
    cost = kinds()[rule.kind].alone if rule.alone is None else rule.alone
    cost += _DOUBTED_RULE * (1.0 - rule.confidence)
    rank = rank_of(event)
    if event.demoted or event.caught == "the interpreter":
        cost += _SUPERSEDED
    elif event.recovered:
        cost += _SURVIVED_IN_PRINT if _is_last_word(event, first) else _SURVIVED
    if is_habitual(event.survived_before):
        cost += _HABITUAL
    if event.caught == "a thread":
        cost += _IN_A_THREAD
    if event.outlived:
        cost += _OUTLIVED if event.is_of_named_process else _OUTLIVED_BY_SOMEBODY
    if event.is_report:
        cost += _REPORT
    if is_bare(event):
        cost += _BARE_EXCEPTION
    if first.rank is not None and rank is not None:
        if rank == first.rank:
            cost += _ENDED_FIRST
        elif first.silent and rule.kind in OF_PEERS - {"collective_timeout"}:
            cost += _AFTER_A_SILENT_END
        elif first.certain and rule.kind not in _OUTSIDE_ANY_RANK:
            cost += _AFTER_A_DEATH
    return cost


def is_bare(event: Event) -> bool:
    """Return True if the line looks like an exception but ends no traceback."""
    return (
        not event.whole_traceback
        and event.rule.id != "python-syntax-error"
        and is_exception(event.text)
    )


def _edges(clusters: Sequence[Cluster]) -> list[dict[int, float]]:
    """Return for each cluster its possible causes, with the costs."""
    return [_edges_to(effect, clusters) for effect in clusters]


def _edges_to(effect: Cluster, clusters: Sequence[Cluster]) -> dict[int, float]:
    costs = {
        index: cost
        for index, cause in enumerate(clusters)
        if cause is not effect and (cost := edge_cost(cause, effect)) is not None
    }
    began = {index: began_wait(clusters[index].span, effect.span) for index in costs}
    if any(fits and _is_known_cause(clusters[index]) for index, fits in began.items()):
        for index, fits in began.items():
            costs[index] += NOT_WHEN_THE_WAIT_BEGAN if fits is False else 0.0
    return costs


def _is_known_cause(cluster: Cluster) -> bool:
    kind = cluster.first.rule.kind
    return cluster.left > _SURVIVED_LEFT and kind not in OF_PEERS | {"teardown", "suspect", "exit"}


def edge_cost(cause: Cluster, effect: Cluster) -> float | None:
    """Return the cost in nats that `cause` brought `effect` about; None if impossible."""
    edge = kinds()[cause.first.rule.kind].brings.get(effect.first.rule.kind)
    if edge is None:
        return None
    cost = edge[1] + _scope_cost(edge[0], cause.ranks, effect.ranks)
    if cause.first.rule.kind in _REPEATED and effect.first.rule.reason in _OF_A_PROGRAM:
        cost += _NO_WORD_OF_A_PEER
    return cost + follows_cost(cause.span, effect.span)


def _scope_cost(where: str, cause: frozenset[int], effect: frozenset[int]) -> float:
    if where == "any":
        return 0.0
    if not cause or not effect:
        return _UNKNOWN_SCOPE
    fits = bool(cause & effect) if where == "same" else len(cause | effect) > 1
    return 0.0 if fits else _ELSEWHERE
