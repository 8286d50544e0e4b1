"""Replay jobs on a cluster, event by event.

The events are arrivals, starts (some by backfill), ends, and preemptions of best-effort jobs.

Each partition has a queue in the order of arrival. If the first job of a queue does not fit, this
job reserves nodes, from the time at which the jobs on these nodes are predicted to end. A later job
is backfilled, which means that the job starts before the first one, only if the reservation is not
delayed (EASY: Lifka, JSSPP 1995). A reservation stays until its job starts or until the predicted
time has passed. Predicted run times are rounded up to the next power of two seconds; if a job runs
for longer than predicted, the prediction is doubled.

The cost of an event does not depend on the number of waiting jobs. This is because waiting jobs are
grouped by size and predicted run time, and only the first job of each group can start next.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from holdfast.simulate.cluster.jobs import Floats, Ints, Jobs
from holdfast.simulate.cluster.nodes import Nodes, Placement
from holdfast.simulate.cluster.policy import Classes

HOUR_S: Final = 3600.0
TOLERANCE: Final = 1e-9
"""The allowed relative difference between the GPU time summed over nodes and summed over jobs."""
_TOLD: Final = 20_000
"""The number of events between two calls of `progress`."""

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayOutcome:
    """The results for jobs and nodes. Shapes: N jobs, H whole hours until the last submission."""

    first_start_s: Floats
    """(N) The start of the job's first run, in seconds."""
    start_s: Floats
    """(N) The start of the job's last run, which was not preempted; in seconds."""
    end_s: Floats
    """(N) The end of the job's last run, in seconds."""
    restarts: Ints
    """(N) The number of times that the job was preempted; 0 unless the job is best-effort."""
    lost_by_job_gpu_s: Floats
    """(N) The GPU-seconds of the job's preempted runs."""
    busy_gpus: Floats
    """(H) The number of GPUs in use at each whole hour."""
    partly_used_nodes: Floats
    """(H) The number of nodes with some GPUs in use and some free."""
    free_on_partly_used: Floats
    """(H) The number of free GPUs on these partly used nodes."""
    largest_fit: Floats
    """(H) The number of GPUs of the largest job that would fit: on all entirely free nodes, or on
    the free GPUs of one node.
    """
    gpus: int
    useful_gpu_s: float
    """The GPU-seconds of runs that were not preempted."""
    lost_gpu_s: float
    """The GPU-seconds of preempted runs."""
    idle_gpu_s: float
    span_s: float
    """The time from the first submission to the last end, in seconds."""
    arrivals_s: float
    """The time from the first submission to the last submission, in seconds."""
    busy_gpu_s: float
    """The GPU-seconds that jobs held until the last submission."""
    backfilled: int
    """The number of jobs that were backfilled: they started before the first job of their queue."""

    @property
    def utilisation(self) -> float:
        """The share of GPU time that jobs held, from the first submission to the last submission."""
        whole = self.gpus * self.arrivals_s
        return self.busy_gpu_s / whole if whole else 0.0


class _Queue:
    """Waiting jobs and the reservation of one partition."""

    __slots__ = (
        "both", "first", "held", "kept", "leaving", "open", "own", "reserved_for", "shadow_s", "sizes", "waiting",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        # The nodes of partition p are in group 2 p; nodes that the first job of its queue has
        # reserved are in group 2 p + 1. Jobs with reserved quota may also use free shared nodes
        # (partition 0).
        self.own, self.kept = 2 * number, 2 * number + 1
        self.open = (self.own, 0) if number else (self.own,)
        """The groups on which a job delays no reservation."""
        self.both = (self.kept, *self.open)
        self.first: tuple[deque[int], deque[int]] = (deque(), deque())
        """For each rank, the jobs in order of arrival. Jobs that have started are removed only when
        they reach the front.
        """
        self.waiting: dict[int, dict[int, deque[int]]] = {}
        """Waiting jobs by number of GPUs, then by rank and by log2 of the predicted run time in
        seconds.
        """
        self.sizes: list[int] = []
        self.leaving: list[tuple[float, int]] = []
        """A heap of predicted ends and jobs; jobs that have ended are removed late."""
        self.held: list[int] = []
        self.reserved_for = -1
        self.shadow_s = 0.0


def replay(
    jobs: Jobs,
    sorted_into: Classes,
    *,
    gpus_per_node: int,
    mode: str,
    progress: Progress | None = None,
) -> ReplayOutcome:
    """Replay jobs on the nodes of a cluster; return what happened to jobs and nodes.

    Args:
        jobs: the jobs, in the order of submission.
        sorted_into: the partition, the limit and the best-effort flag of each job, from
            `policy.classes`.
        gpus_per_node: the number of GPUs of each node.
        mode: the mode of the best-effort jobs (see `Policy.mode`).
        progress: called every `_TOLD` events with a description, the number of jobs that have
            arrived, and the number of all jobs.

    Raises:
        RuntimeError: the GPU time summed over nodes differs from the sum over jobs by more than
            `TOLERANCE`, or a job never started. Either is a bug of this module.
    """
    return _Replay(jobs, sorted_into, gpus_per_node, mode, progress).outcome()


class _Replay:
    """See `replay`."""

    def __init__(
        self,
        jobs: Jobs,
        sorted_into: Classes,
        per: int,
        mode: str,
        progress: Progress | None,
    ) -> None:
        self.number = len(jobs)
        # Lists: a loop in Python reads them several times faster than arrays.
        self.submit_s = jobs.submit_s.tolist()
        self.run_s = jobs.run_s.tolist()
        self.gpus = jobs.gpus.tolist()
        self.exponent = np.ceil(np.log2(np.maximum(jobs.predicted_s, 1.0))).astype(int).tolist()
        self.partition = sorted_into.partition.tolist()
        preemptible = mode == "preemptible" and bool(sorted_into.best_effort.any())
        nothing = [False] * self.number
        self.yields = sorted_into.best_effort.tolist() if preemptible else nothing
        self.rank = nothing if mode == "preemptible" else sorted_into.best_effort.tolist()
        self.limit = sorted_into.limit.tolist()
        self.limits = sorted_into.limits
        self.admitted = [0] * len(self.limits)
        self.outside: list[deque[int]] = [deque() for _ in self.limits]
        sizes = [nodes for size in sorted_into.sizes for nodes in (size, 0)]
        self.regular = Nodes(sizes, per)
        """The nodes as regular jobs see them: GPUs held by best-effort jobs count as free."""
        self.actual = Nodes(sizes, per) if preemptible else self.regular
        self.every = tuple(range(len(sizes)))
        self.queues = [_Queue(number) for number in range(len(sorted_into.sizes))]
        self.yielding: dict[int, deque[int]] = {}
        self.guests: dict[int, list[int]] = {}
        """For each node, the best-effort jobs on the node in the order of their starts."""
        self.ends: list[tuple[float, int, int]] = []
        self.placed: dict[int, Placement] = {}
        self.first_start_s = [math.nan] * self.number
        self.start_s = [math.nan] * self.number
        self.end_s = [math.nan] * self.number
        self.restarts = [0] * self.number
        self.total = sum(sorted_into.sizes) * per
        self.free = self.total
        self.now_s = 0.0
        self.busy_gpu_s = 0.0
        self.idle_gpu_s = 0.0
        self.lost_gpu_s = [0.0] * self.number
        self.backfilled = 0
        self.hours: list[tuple[float, float, float, float]] = []
        self.progress = progress

    def outcome(self) -> ReplayOutcome:
        busy_at_last_s = self._run()
        if self.placed or self.number != sum(map(math.isfinite, self.end_s)):
            raise RuntimeError("Jobs were still waiting after the last event.")
        useful = math.fsum(gpus * run_s for gpus, run_s in zip(self.gpus, self.run_s, strict=True))
        lost = math.fsum(self.lost_gpu_s)
        whole = self.total * self.now_s
        for what, one, other in (
            ("held", self.busy_gpu_s, useful + lost),
            ("of all nodes", whole, useful + lost + self.idle_gpu_s),
        ):
            if abs(one - other) > TOLERANCE * max(one, other, 1.0):
                raise RuntimeError(
                    f"The GPU time {what} is {one} s by nodes and {other} s by jobs."
                )
        hours = np.array(self.hours, dtype=float).reshape(-1, 4)
        return ReplayOutcome(
            first_start_s=np.array(self.first_start_s),
            start_s=np.array(self.start_s),
            end_s=np.array(self.end_s),
            restarts=np.array(self.restarts, dtype=np.int64),
            lost_by_job_gpu_s=np.array(self.lost_gpu_s),
            busy_gpus=hours[:, 0],
            partly_used_nodes=hours[:, 1],
            free_on_partly_used=hours[:, 2],
            largest_fit=hours[:, 3],
            gpus=self.total,
            useful_gpu_s=useful,
            lost_gpu_s=lost,
            idle_gpu_s=self.idle_gpu_s,
            span_s=self.now_s,
            arrivals_s=self.submit_s[-1] if self.number else 0.0,
            busy_gpu_s=busy_at_last_s,
            backfilled=self.backfilled,
        )

    def _run(self) -> float:
        """Process all events; return the GPU-seconds that jobs held until the last submission."""
        submit_s, ends, number = self.submit_s, self.ends, self.number
        come, events, next_hour_s = 0, 0, 0.0
        last_s = submit_s[-1] if number else 0.0
        busy_at_last_s = 0.0
        while come < number or ends:
            at_s = submit_s[come] if come < number else math.inf
            if ends and ends[0][0] < at_s:
                at_s = ends[0][0]
            while next_hour_s <= min(at_s, last_s):
                self._look()
                next_hour_s += HOUR_S
            passed_s = at_s - self.now_s
            self.busy_gpu_s += (self.total - self.free) * passed_s
            self.idle_gpu_s += self.free * passed_s
            self.now_s = at_s
            freed: set[int] = set()
            new: list[int] = []
            while ends and ends[0][0] <= at_s:
                _, job, restarts = heappop(ends)
                if self.restarts[job] == restarts:
                    self._end(job, freed, new)
            while come < number and submit_s[come] <= at_s:
                self._arrive(come, new)
                come += 1
                if come == number:
                    busy_at_last_s = self.busy_gpu_s
            self._schedule(freed, new)
            events += 1
            if self.progress and events % _TOLD == 0:
                self.progress("Replaying jobs", come, number)
        return busy_at_last_s

    def _arrive(self, job: int, new: list[int]) -> None:
        """Add an arrived job to `new`, or keep the job outside the queue because of its limit."""
        if (limit := self.limit[job]) >= 0:
            if self.outside[limit] or self.admitted[limit] + self.gpus[job] > self.limits[limit]:
                self.outside[limit].append(job)
                return
            self.admitted[limit] += self.gpus[job]
        new.append(job)

    def _end(self, job: int, freed: set[int], new: list[int]) -> None:
        self.end_s[job] = self.now_s
        self._release(job)
        # The end of a best-effort job helps only other best-effort jobs. For regular jobs, its GPUs
        # have counted as free all along.
        freed.update((-1,) if self.yields[job] else range(len(self.queues)))
        if (limit := self.limit[job]) >= 0:
            self.admitted[limit] -= self.gpus[job]
            outside = self.outside[limit]
            while outside and self.admitted[limit] + self.gpus[outside[0]] <= self.limits[limit]:
                self.admitted[limit] += self.gpus[outside[0]]
                new.append(outside.popleft())

    def _release(self, job: int) -> None:
        yields = self.yields[job]
        for node, gpus in self.placed.pop(job):
            self.actual.change(node, gpus)
            if yields:
                self.guests[node].remove(job)
            elif self.actual is not self.regular:
                self.regular.change(node, gpus)
        self.free += self.gpus[job]

    def _schedule(self, freed: set[int], new: list[int]) -> None:
        """Start the jobs that can start after jobs have ended or arrived.

        Args:
            freed: the partitions in which regular jobs may find more free GPUs than before; -1
                stands for the GPUs of best-effort jobs.
            new: the jobs that have entered their queue.
        """
        for job in new:
            if self.yields[job]:
                self.yielding.setdefault(self.gpus[job], deque()).append(job)
                freed.add(-1)
                continue
            queue = self.queues[self.partition[job]]
            if self.partition[job] in freed or not self._waits_behind(queue, job):
                self._wait(queue, job)
                freed.add(self.partition[job])
            # Nothing else has changed: only the new job may be able to start.
            elif not self._start_early(queue, job):
                self._wait(queue, job)
        for number in sorted(freed - {-1}, reverse=True):  # reserved quota comes first
            self._pass(self.queues[number])
        if self.yielding and (freed or new):
            self._start_yielding()

    def _waits_behind(self, queue: _Queue, job: int) -> bool:
        """Return True if the first job of the queue holds a reservation that `job` must not delay."""
        first = self._first(queue)
        return (
            first is not None
            and queue.reserved_for == first
            and self.now_s < queue.shadow_s
            and self.rank[first] <= self.rank[job]
        )

    def _wait(self, queue: _Queue, job: int) -> None:
        size = self.gpus[job]
        if size not in queue.waiting:
            queue.waiting[size] = {}
            queue.sizes = sorted(queue.waiting)
        key = self.rank[job] * 64 + self.exponent[job]
        queue.waiting[size].setdefault(key, deque()).append(job)
        queue.first[self.rank[job]].append(job)

    def _first(self, queue: _Queue) -> int | None:
        for row in queue.first:
            while row and self.start_s[row[0]] == self.start_s[row[0]]:
                row.popleft()
            if row:
                return row[0]
        return None

    def _pass(self, queue: _Queue) -> None:
        """Start jobs in the order of the queue while they fit; then backfill."""
        while (first := self._first(queue)) is not None:
            if not self.regular.fits(queue.both, self.gpus[first]):
                break
            self._drop_reservation(queue)
            self._leave_queue(queue, first)
            self._start(first, queue.both)
        if first is None:
            self._drop_reservation(queue)
            return
        if queue.reserved_for != first or self.now_s >= queue.shadow_s:
            self._reserve(queue, first)
        self._backfill(queue)

    def _leave_queue(self, queue: _Queue, job: int) -> None:
        size = self.gpus[job]
        rows = queue.waiting[size]
        key = self.rank[job] * 64 + self.exponent[job]
        rows[key].popleft()
        if not rows[key]:
            del rows[key]
            if not rows:
                del queue.waiting[size]
                queue.sizes = sorted(queue.waiting)

    def _ends_in_time(self, queue: _Queue, job: int) -> bool:
        return bool(self.now_s + 2.0 ** self.exponent[job] <= queue.shadow_s)

    def _start_early(self, queue: _Queue, job: int) -> bool:
        groups = queue.both if self._ends_in_time(queue, job) else queue.open
        if not self.regular.fits(groups, self.gpus[job]):
            return False
        self.backfilled += 1
        self._start(job, groups)
        return True

    def _backfill(self, queue: _Queue) -> None:
        while True:
            best = -1
            for size in queue.sizes:
                in_open = self.regular.fits(queue.open, size)
                if not in_open and not self.regular.fits(queue.both, size):
                    break  # larger jobs do not fit either
                for row in queue.waiting[size].values():
                    job = row[0]
                    if (in_open or self._ends_in_time(queue, job)) and (
                        best < 0 or (self.rank[job], job) < (self.rank[best], best)
                    ):
                        best = job
            if best < 0:
                return
            self._leave_queue(queue, best)
            self._start_early(queue, best)

    def _reserve(self, queue: _Queue, job: int) -> None:
        """Reserve nodes for a job, from the first time at which the job is predicted to fit."""
        self._drop_reservation(queue)
        nodes, leaving = self.regular, queue.leaving
        full, rest = divmod(self.gpus[job], nodes.per)
        at_hand = nodes.whole((queue.own,))
        partly = nodes.partly((queue.own,), rest) if rest else None
        later: dict[int, int] = {}
        whole_later: list[int] = []
        left: list[tuple[float, int]] = []
        while True:
            spare = at_hand + len(whole_later) - full
            if spare >= 0 and (not rest or spare > 0 or partly is not None):
                break
            end_s, other = heappop(leaving)
            if other not in self.placed:
                continue
            if end_s <= self.now_s:
                heappush(leaving, (self._predicted_end_s(other), other))
                continue
            left.append((end_s, other))
            for node, gpus in self.placed[other]:
                if nodes.group[node] != queue.own:
                    continue
                later[node] = free = later.get(node, nodes.free[node]) + gpus
                if free == nodes.per:
                    whole_later.append(node)
                    if node == partly:
                        partly = None
                elif rest and free >= rest and partly is None:
                    partly = node
        queue.reserved_for, queue.shadow_s = job, left[-1][0] if left else self.now_s
        for one in left:
            heappush(leaving, one)
        wanted = full + (1 if rest and partly is None else 0)
        picked = nodes.buckets[queue.own][nodes.per][:wanted]
        picked += whole_later[: wanted - len(picked)]
        if rest and partly is not None:
            picked.append(partly)
        for node in picked:
            self._move(node, queue.kept)
        queue.held = picked

    def _predicted_end_s(self, job: int) -> float:
        """Return the predicted end of a job.

        The predicted run time is doubled until the predicted end lies in the future.
        """
        lasts_s = 2.0 ** self.exponent[job]
        while self.start_s[job] + lasts_s <= self.now_s:
            lasts_s *= 2
        return float(self.start_s[job] + lasts_s)

    def _drop_reservation(self, queue: _Queue) -> None:
        for node in queue.held:
            self._move(node, queue.own)
        queue.held = []
        queue.reserved_for = -1

    def _move(self, node: int, group: int) -> None:
        self.regular.move(node, group)
        if self.actual is not self.regular:
            self.actual.move(node, group)

    def _start(self, job: int, groups: tuple[int, ...]) -> None:
        """Start a job that fits; preempt best-effort jobs if there are not enough idle GPUs."""
        found = self.actual.find(groups, self.gpus[job])
        if self.actual is not self.regular:
            if found is None:
                found = self.regular.find(groups, self.gpus[job])
                for node, gpus in found or ():
                    while self.actual.free[node] < gpus:
                        self._make_room(self.guests[node][-1])
            for node, gpus in found or ():
                self.regular.change(node, -gpus)
        if found is None:
            raise RuntimeError(f"Job {job} does not fit where the search placed it.")
        self._hold(job, found)
        ends_s = self._predicted_end_s(job)
        for number in {self.regular.group[node] // 2 for node, _ in found}:
            queue = self.queues[number]
            heappush(queue.leaving, (ends_s, job))
            if len(queue.leaving) > 4 * len(self.placed) + 1000:
                queue.leaving = [one for one in queue.leaving if one[1] in self.placed]
                heapify(queue.leaving)

    def _hold(self, job: int, found: Placement) -> None:
        for node, gpus in found:
            self.actual.change(node, -gpus)
        self.placed[job] = found
        self.free -= self.gpus[job]
        self.start_s[job] = self.now_s
        if self.first_start_s[job] != self.first_start_s[job]:
            self.first_start_s[job] = self.now_s
        heappush(self.ends, (self.now_s + self.run_s[job], job, self.restarts[job]))

    def _make_room(self, job: int) -> None:
        """Preempt a best-effort job, and queue the job again before the others of its size."""
        self._release(job)
        self.lost_gpu_s[job] += self.gpus[job] * (self.now_s - self.start_s[job])
        self.restarts[job] += 1
        self.start_s[job] = math.nan
        self.yielding.setdefault(self.gpus[job], deque()).appendleft(job)

    def _start_yielding(self) -> None:
        """Start best-effort jobs on idle GPUs of any node, in the order of arrival.

        A job that does not fit is skipped.
        """
        while self.yielding:
            best = -1
            for size in sorted(self.yielding):
                if not self.actual.fits(self.every, size):
                    break
                job = self.yielding[size][0]
                if best < 0 or job < best:
                    best = job
            if best < 0:
                return
            row = self.yielding[self.gpus[best]]
            row.popleft()
            if not row:
                del self.yielding[self.gpus[best]]
            found = self.actual.find(self.every, self.gpus[best])
            if found is None:
                raise RuntimeError(f"Job {best} does not fit where the search placed it.")
            self._hold(best, found)
            for node, _ in found:
                self.guests.setdefault(node, []).append(best)

    def _look(self) -> None:
        """Record the number of GPUs in use, and the figures of fragmentation, at a whole hour."""
        nodes = self.actual
        partly = free = block = 0
        for rows in nodes.buckets:
            for size in range(1, nodes.per):
                if count := len(rows[size]):
                    partly += count
                    free += count * size
                    block = max(block, size)
        whole = nodes.whole(self.every) * nodes.per
        self.hours.append((self.total - self.free, partly, free, max(whole, block)))
