"""Find the least-cost explanation of all events, and the rival explanations.

Each event has one of three explanations: the event began the failure, another event caused it
(`causes.yaml`), or the event is unrelated to the failure. Each explanation has a cost, and so has
the end of the job. The cost is about -ln of a probability, in nats. For each event that could be
the root, the costs of the cheapest explanations of all events are added up. The candidate with the
least sum is the root; the sums of the other candidates show how certain this is.

An explanation is an arborescence, a tree from causes to effects. Each event is charged only for its
direct cause, so the cost of a cause with many effects counts once. The order of lines and files has
no influence, since the effects may be printed before their cause.
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
"""The cost of an edge if the location of one of its two events is unknown."""
_ELSEWHERE: Final = 2.5
"""The cost of an edge between events of two processes, for a cause that normally has effects only
in its own process. Such an effect is possible on the same host or GPU, but rare."""
_SURVIVED: Final = 4.5
"""The cost of a root after which its process made progress, or the job did for long enough."""
_SURVIVED_IN_PRINT: Final = 2.0
"""The lower cost of a root that was survived, if the event is the last line of the rank that ended
first. In this case the steps below the line may be output that was buffered before."""
_BUFFERED_LINES: Final = 200
"""The number of lines in the stdio buffer of one process (8 KiB) plus the launcher's report of the
end.
"""
_SUPERSEDED: Final = 5.0
"""The cost of a root if another line of the same chain of tracebacks is a better root, or if Python
continued after the exception."""
_HABITUAL: Final = 4.5
"""The cost of a root if the job had survived the same error several times before."""
_OUTLIVED: Final = 1.5
"""The cost of a root if the process logged many lines after the event, and then another error."""
_OUTLIVED_BY_SOMEBODY: Final = 0.3
"""The lower cost of a root followed by another error, if the log does not show which process
printed a line. In this case, another process may have raised the other error.
"""
_IN_A_THREAD: Final = 1.0
"""The cost of a root if the exception ended only a thread, and the program continued."""
_REPORT: Final = 1.5
"""The cost of a root if text of the job introduces or quotes the line, which may then be about
another program."""
_BARE_EXCEPTION: Final = 0.4
"""The cost of a root if an exception has no traceback, since the program may have logged and
handled the exception."""
_DOUBTED_RULE: Final = 1.0
"""The cost of a root if its rule is never correct about the reason. For other rules, the cost is
proportional to the share of wrong reasons.
"""
_AFTER_A_DEATH: Final = 3.0
"""The cost of a root on another rank, if the rank that ended first was certainly killed."""
_AFTER_A_SILENT_END: Final = 1.8
"""The cost of a root that reports a lost peer, if the rank that ended first is silent and another
rank.
"""
_ENDED_FIRST: Final = -0.2
"""The bonus for a root on the rank that ended first. It is small, since two exits a few
milliseconds apart may be observed in either order.
"""
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
"""Kinds of events that remain as likely if another rank has died first."""
_ENDS: Final = frozenset({"death", "crash", "frozen", "exit", "host_memory", "scheduler"})
"""Kinds of events that report the end of a process."""
OF_PEERS: Final = frozenset({"peer_lost", "store_lost", "collective_timeout"})
"""Kinds of events in which a process reports on its peers."""
_REPEATED: Final = OF_PEERS | {"exit", "teardown"}
"""Kinds of events that count as one consequence, however many there are and with any words."""
_OF_A_PROGRAM: Final = frozenset(
    {
        *(reason for reason, category in CATEGORIES.items() if category == "Script"),
        *("AttributeError", "AssertionError", "ValueError", "ZeroDivisionError"),
        *("ModelLoadingError", "DatasetLoadingError"),
    }
) - {"OSError", "CalledProcessError"}
"""Reasons that originate in a program. A lost connection causes connection errors instead of these.
"""
_NO_WORD_OF_A_PEER: Final = 1.5
"""The cost of an edge from a lost peer to an error whose text does not mention a peer."""
_SURVIVED_LEFT: Final = 0.05
"""The cost of leaving a line unexplained that was survived or superseded."""
_BROKEN_LOSS: Final = frozenset({"observer-not-finite", "observer-spike"})
"""The rules for a broken loss that the supervisor observed. All ranks still trained at that time.
"""
_OF_A_STOPPED_JOB: Final = OF_PEERS | {
    "worker_lost",
    "exception",
    "crash",
    "death",
    "exit",
    "suspect",
}
"""Kinds of events that processes log when the supervisor kills their job. If the supervisor killed
the job because of a broken loss, such an event is a consequence, or was survived before."""


@dataclass(eq=False, kw_only=True)
class Cluster:
    """Events, of any ranks, that match the same rule and have the same text apart from numbers.

    For the kinds in `_REPEATED`, the texts may differ.
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
"""The relation of a cluster to a candidate: it follows from the candidate, is unrelated to the end
of the job, or is a separate fault.
"""


@dataclass(frozen=True, kw_only=True)
class Reckoning:
    """The cost of all events if one candidate is the root, in nats."""

    alone: float
    """The cost of the assumption that the candidate began without a cause."""
    end: float
    """The cost of the assumption that the candidate or a consequence ended the job."""
    others: Sequence[tuple[Cluster, How, float]]
    """Each other cluster, its relation to the candidate, and the cost of this relation."""

    @property
    def total(self) -> float:
        """Return the sum of all costs, by which candidates are compared."""
        return self.alone + self.end + sum(cost for _, _, cost in self.others)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The root and the rival candidates."""

    ranked: Sequence[Cluster] = ()
    """The candidates for the root, the most likely first; empty if there are no events."""
    shares: Sequence[float] = ()
    """The share of each candidate in the likelihood, 0 to 1, in the order of the candidates."""
    reckonings: Sequence[Reckoning] = ()
    """The costs of each candidate, in the order of the candidates."""
    caused: frozenset[int] = field(default_factory=frozenset)
    """The values `id(cluster)` of the clusters that follow from the root."""

    @functools.cached_property
    def by_reason(self) -> Mapping[str, tuple[float, Cluster]]:
        """Return, for each reason, the sum of its candidates' shares and its most likely candidate."""
        found: dict[str, tuple[float, Cluster]] = {}
        for cluster, share in zip(self.ranked, self.shares, strict=True):
            before, likeliest = found.get(cluster.first.rule.reason, (0.0, cluster))
            found[cluster.first.rule.reason] = (before + share, likeliest)
        return found


@dataclass(frozen=True)
class FirstEnd:
    """The rank that ended first, according to observations."""

    rank: int | None
    certain: bool
    """True if no peer can have caused the end."""
    last_said: int = -1
    """The event of the rank's last error that was not survived: an exception or a report on peers.
    """
    silent: bool = False
    """True if the rank's own log has no error. In this case, the lost connections that peers report
    follow from the rank's end."""
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
    """Compute the cost of the cheapest explanation in which `root` began the failure.

    A root that was survived or superseded has no consequences.
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
    """Return the cost of `cluster` if it does not follow from the root, and its relation."""
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
    """Return the consequences of `root`, without branches that cost less if they are unrelated."""
    children: dict[int, list[int]] = {}
    for index, parent in parents.items():
        children.setdefault(parent, []).append(index)

    def branch(index: int) -> tuple[float, float, set[int]]:
        """Return the cost of a branch, its cost if unrelated, and the nodes of it that remain."""
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
    """Return True if the event may be its process's last line, though steps are printed below.

    A program with buffered output prints its traceback first, and the last kilobytes of steps when
    it exits.
    """
    rank = rank_of(event)
    if first.rank is None or rank not in (None, first.rank) or event.lines_below > _BUFFERED_LINES:
        return False
    if event.log_line < first.last_said:
        return False
    # If the outputs of the ranks were concatenated, the steps of other ranks are printed below.
    return event.whole_traceback or (rank is not None and not event.own_progress)


def rank_of(event: Event) -> int | None:
    """Return the rank that the text of the event names, or else the rank that printed the event."""
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
    # If a launcher names only the local rank, the job has one node, as far as the log shows.
    return (
        int(event.captures["local_rank"])
        if rank is None and "local_rank" in event.captures
        else rank
    )


def _place(event: Event) -> tuple[int, str, int]:
    # Ties are broken by file name and line number, so that the order of the files has no influence.
    # Lines that can be cited come before observations.
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
    """Reorder `events` such that one event of each wording comes first.

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
    """Return True if the line looks like an exception, but there is no traceback before it."""
    return (
        not event.whole_traceback
        and event.rule.id != "python-syntax-error"
        and is_exception(event.text)
    )


def _edges(clusters: Sequence[Cluster]) -> list[dict[int, float]]:
    """Return, for each cluster, its possible causes with the costs of the edges."""
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
    """Return the cost, in nats, of the edge from `cause` to `effect`; None if it is impossible."""
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
