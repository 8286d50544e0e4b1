"""Find ranks for which the others wait at each step, and training that has become slower.

A slow rank makes the steps of all ranks slow, since the others wait for it in collectives. So step
times do not show which rank is slow. What differs is the time at which ranks begin the same
collective: a slow rank begins late. The delay of a rank is the time that it loses relative to the
median rank of the group: from one collective of a step to the next, and before the first collective
of each step. A rank may also begin late because it waits for a slow rank in another of its groups.
Such a rank is not slow itself.

The clocks of nodes differ. A rank reads its collectives after the supervisor has sent a request,
and before the answer arrives. These two times bound the offset of the node's clock. A delay that is
smaller than the remaining uncertainty does not count.
"""

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from holdfast.recover.detectors.collectives import Begun, roots

SLOW_SHARE = 0.15
"""A rank becomes slow if the others wait for it for at least this share of the time."""
WELL_SHARE = 0.05
"""A slow rank is no longer slow if the share falls below this one."""
PARTS = 4
PARTS_SLOW = 3
"""The time is divided into `PARTS` parts. The share must be exceeded in this number of parts, so
that a single event, such as a save of one rank, does not count."""
MIN_COLLECTIVES = 12
MIN_DELAY_S = 0.002
BETWEEN_LOOKS_S = 2.0
STEPS_BETWEEN_LOOKS = 4.0
COST_FACTOR = 500.0
"""Reading the collectives takes at most 1 / this number of a rank's time."""
ANSWER_S = 5.0
"""Ranks that have not answered within this number of seconds are left out."""
MAX_COST_S = 1.0
OFFSETS = 256
"""The offset of a node's clock is bounded by this number of its last answers."""
SLOWER = 1.25
"""The training has become slower if its median step time exceeds its best median by this factor."""
AS_BEFORE = 1.10
"""It is no longer slower if the median step time falls below this multiple of the best median."""
WINDOW = 64


@dataclass(frozen=True, kw_only=True)
class SlowRanks:
    """The ranks for which the others wait; none if no rank is slow any more."""

    shares: Mapping[int, float]
    """For each slow rank, the share of the time for which the others wait for it."""
    node: str | None = None
    """The node with all slow ranks, if there is one and the job has other nodes."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        shares = {str(rank): round(share, 3) for rank, share in self.shares.items()}
        return {"shares": shares, "node": self.node}


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A change of the step time."""

    step_s: float
    before_s: float
    """The best median step time of the attempt, in seconds."""
    is_over: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class SlowDetector:
    """Find slow ranks in one attempt from their collectives. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._asked_s: float | None = None
        self._is_waiting = False
        self._cost_s = 0.0
        self._answers: dict[int, Begun | None] = {}
        self._nodes: dict[int, str] = {}
        self._offsets: dict[str, deque[tuple[float, float]]] = {}
        """For each node, the bounds on the offset of its clock, from its last answers."""
        self._slow: frozenset[int] = frozenset()

    def due(self, now_s: float, median_step_s: float | None) -> bool:
        """Return True if it is time to request their collectives from the ranks."""
        if median_step_s is None or self._is_waiting:
            return False
        rest_s = max(
            BETWEEN_LOOKS_S, STEPS_BETWEEN_LOOKS * median_step_s, COST_FACTOR * self._cost_s
        )
        return self._asked_s is None or now_s - self._asked_s >= rest_s

    def request_sent(self, now_s: float) -> None:
        """Record that the supervisor has sent the request to the ranks."""
        self._asked_s, self._is_waiting, self._answers = now_s, True, {}

    def answered(self, rank: int, node: str, begun: Begun | None, at_s: float) -> None:
        """Record the answer of a rank on the node `node`, which arrived at `at_s`."""
        self._answers[rank], self._nodes[rank] = begun, node
        if begun is not None:
            self._cost_s = max(0.9 * self._cost_s, min(MAX_COST_S, begun.cost_s))
            bounds = (self._asked_s or at_s) - begun.read_at_s, at_s - begun.read_at_s
            self._offsets.setdefault(node, deque(maxlen=OFFSETS)).append(bounds)

    def look(self, now_s: float, ranks: set[int]) -> SlowRanks | None:
        """Return the slow ranks once all living ranks have answered; None if they have not changed."""
        if not self._is_waiting or self._asked_s is None:
            return None
        if not ranks <= set(self._answers) and now_s - self._asked_s < ANSWER_S:
            return None
        self._is_waiting = False
        begun = {rank: one for rank, one in self._answers.items() if one is not None}
        offsets = {
            node: (max(low for low, _ in known), min(high for _, high in known))
            for node, known in self._offsets.items()
        }
        shifted = {rank: one.shifted(offsets[self._nodes[rank]][1]) for rank, one in begun.items()}
        open_s = {node: max(0.0, high - low) for node, (low, high) in offsets.items()}
        is_one = len({self._nodes[rank] for rank in begun}) < 2
        least_s = {rank: MIN_DELAY_S + (0.0 if is_one else max(open_s.values())) for rank in begun}
        shares = _shares(shifted, least_s)
        if shares is None:
            return None
        limit = {rank: WELL_SHARE if rank in self._slow else SLOW_SHARE for rank in shares}
        late = {
            rank: {group for group, share in one.items() if share >= limit[rank]}
            for rank, one in shares.items()
        }
        slow = frozenset(roots(late, shares))
        if slow == self._slow:
            return None
        self._slow = slow
        nodes = {self._nodes[rank] for rank in slow}
        is_one = len(nodes) == 1 and len(set(self._nodes.values())) > 1
        return SlowRanks(
            shares={rank: max(shares[rank].values()) for rank in sorted(slow)},
            node=nodes.pop() if is_one else None,
        )


def _shares(
    begun: Mapping[int, Begun], least_s: Mapping[int, float]
) -> dict[int, dict[str, float]] | None:
    """Return the share of time that others wait, by rank and group; None if data are too few."""
    groups: dict[str, list[int]] = {}
    for rank, one in begun.items():
        for group in {group for group, _ in one.at_s}:
            groups.setdefault(group, []).append(rank)
    shares: dict[int, dict[str, float]] = {}
    for group, members in groups.items():
        common = set.intersection(
            *({key for key in begun[rank].at_s if key[0] == group} for rank in members)
        )
        if len(members) < 2 or len(common) < MIN_COLLECTIVES:
            continue
        times = {rank: [begun[rank].at_s[key] for key in sorted(common)] for rank in members}
        first = min(members)
        begins = _begins_step(times[first], begun[first].steps_s)
        for rank, share in _shares_of_group(times, begins, least_s).items():
            shares.setdefault(rank, {})[group] = share
    return shares or None


def _begins_step(times: Sequence[float], steps_s: Sequence[float]) -> list[bool]:
    """Return for each collective, except the first, True if it is the first one of a step."""
    count = [bisect_left(steps_s, at_s) for at_s in times]
    return [before < now for before, now in itertools.pairwise(count)]


def _shares_of_group(
    times: Mapping[int, Sequence[float]], begins: Sequence[bool], least_s: Mapping[int, float]
) -> dict[int, float]:
    """Return, for each rank, the share of waiting that is exceeded in enough parts of the time.

    Args:
        times: for each rank, the start time of each collective, in seconds.
        begins: for each collective, except the first, True if it is the first one of a step.
        least_s: for each rank, the shortest delay in seconds that counts.
    """
    count = len(next(iter(times.values())))
    middle = [
        sorted(one[index] for one in times.values())[(len(times) - 1) // 2]
        for index in range(count)
    ]
    bounds = [round(part * (count - 1) / PARTS) for part in range(PARTS + 1)]
    shares = {}
    for rank, one in times.items():
        late_s = [max(0.0, own - other) for own, other in zip(one, middle, strict=True)]
        # Before each step all ranks have waited for each other, so a delay at the step's first
        # collective began in this step.
        lost_s = [
            max(0.0, now - (0.0 if is_first else before))
            for (before, now), is_first in zip(itertools.pairwise(late_s), begins, strict=True)
        ]
        parts = []
        for begin, end in itertools.pairwise(bounds):
            passed_s = middle[end] - middle[begin]
            delay_s = sum(one for one in lost_s[begin:end] if one >= least_s[rank])
            parts.append(delay_s / passed_s if passed_s > 0 else 0.0)
        shares[rank] = min(1.0, sorted(parts)[PARTS - PARTS_SLOW])
    return shares


class Throughput:
    """Find out from the step times of one attempt if training has become slower."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=WINDOW)
        self._best_s: float | None = None
        self._is_slower = False
        self._count = 0

    def stepped(self, step_s: float) -> Slower | None:
        """Record the time of a step; return a `Slower` if the state has changed, else None."""
        self._recent_s.append(step_s)
        self._count += 1
        if self._count % WINDOW:
            return None
        now_s = median(self._recent_s)
        best_s = self._best_s
        self._best_s = now_s if best_s is None else min(best_s, now_s)
        if best_s is None:
            return None
        if not self._is_slower and now_s > SLOWER * best_s:
            self._is_slower = True
        elif self._is_slower and now_s < AS_BEFORE * best_s:
            self._is_slower = False
        else:
            return None
        return Slower(step_s=now_s, before_s=best_s, is_over=not self._is_slower)
