"""Queue requests so that the longest remaining path comes first, in amortised constant time.

Each task has buckets of requests of nearly equal length. A new observation scales all lengths of
its task by the same factor. So the task moves relative to other tasks, while the order within the
task stays the same.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

Entry = int | tuple[int, ...]
"""A request, or a tuple of requests that one forward pass answers together."""

BUCKETS_PER_E = 12
"""The number of buckets for lengths that differ by a factor of e.

So the lengths within a bucket differ by at most 8.7 %.
"""


class Bucket:
    """Entries of about the same length.

    The costs are the means over the entries, as expected when the entries were added.
    """

    __slots__ = ("entries", "metric_s", "most_tokens", "prefill_s", "tokens")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.prefill_s = 0.0
        self.tokens = 0.0
        self.most_tokens = 0.0
        self.metric_s = 0.0


class _TaskQueue:
    __slots__ = ("buckets", "factor", "levels")

    def __init__(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self.levels: list[int] = []  # a heap of negated bucket numbers
        self.factor = 1.0

    def length_s(self) -> float:
        return math.exp(-self.levels[0] / BUCKETS_PER_E) * self.factor


class LongestFirst:
    """Queue the requests of one model; `count` is the number of entries."""

    __slots__ = ("_front", "_order", "_tasks", "count")

    def __init__(self) -> None:
        self.count = 0
        self._front: deque[Entry] = deque()
        self._tasks: dict[int, _TaskQueue] = {}
        # A heap of (negated length of the task's longest entry, task), exact at its top.
        self._order: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return self.count

    def add(
        self,
        task: int,
        entry: Entry,
        *,
        length_s: float,
        prefill_s: float,
        metric_s: float,
        tokens: float = 0.0,
        most_tokens: float = 0.0,
    ) -> None:
        """Add an entry with an expected time of `length_s`, ahead of entries of the same length."""
        self.count += 1
        queue = self._tasks.get(task)
        if queue is None:
            queue = self._tasks[task] = _TaskQueue()
        level = math.floor(math.log(max(length_s, 1e-6)) * BUCKETS_PER_E)
        bucket = queue.buckets.get(level)
        if bucket is None:
            bucket = queue.buckets[level] = Bucket()
            was_longest = queue.levels[0] if queue.levels else None
            heappush(queue.levels, -level)
            if queue.levels[0] != was_longest:
                heappush(self._order, (-queue.length_s(), task))
        bucket.entries.append(entry)
        count = len(bucket.entries)
        bucket.prefill_s += (prefill_s - bucket.prefill_s) / count
        bucket.tokens += (tokens - bucket.tokens) / count
        bucket.most_tokens += (most_tokens - bucket.most_tokens) / count
        bucket.metric_s += (metric_s - bucket.metric_s) / count

    def add_front(self, entry: Entry) -> None:
        """Add an entry that came back from an engine, ahead of all entries in the buckets."""
        self.count += 1
        self._front.append(entry)

    def longest_s(self) -> float:
        """Return the length in seconds of the next entry.

        The length is infinite for an entry that came back from an engine, and 0 if the queue is
        empty.
        """
        if self._front:
            return math.inf
        return -self._order[0][0] if self._settle() else 0.0

    def pop(self) -> Entry:
        """Remove and return the next entry.

        Raises:
            IndexError: the queue is empty.
        """
        if self._front:
            self.count -= 1
            return self._front.popleft()
        if not self._settle():
            raise IndexError("pop from an empty queue")
        self.count -= 1
        task = self._order[0][1]
        queue = self._tasks[task]
        level = -queue.levels[0]
        bucket = queue.buckets[level]
        entry = bucket.entries.pop()
        if not bucket.entries:
            del queue.buckets[level]
            heappop(queue.levels)
            if queue.levels:
                heapreplace(self._order, (-queue.length_s(), task))
            else:
                heappop(self._order)
                del self._tasks[task]
        return entry

    def peek(self) -> Entry | None:
        """Return the next entry without removing it; None if the queue is empty."""
        if self._front:
            return self._front[0]
        if not self._settle():
            return None
        queue = self._tasks[self._order[0][1]]
        return queue.buckets[-queue.levels[0]].entries[-1]

    def review(self, factor: Callable[[int], float]) -> None:
        """Sort the tasks again, by the lengths given to `add` times `factor(task)`."""
        for task, queue in self._tasks.items():
            queue.factor = factor(task)
        self._order = [(-queue.length_s(), task) for task, queue in self._tasks.items()]
        heapify(self._order)

    def buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Yield each task's buckets, without the entries that came back from engines."""
        for task, queue in self._tasks.items():
            for bucket in queue.buckets.values():
                yield task, bucket

    def front(self) -> Iterator[Entry]:
        """Iterate over the entries that came back from engines."""
        return iter(self._front)

    def clear(self) -> None:
        """Remove all entries."""
        self.count = 0
        self._front.clear()
        self._tasks.clear()
        self._order.clear()

    def _settle(self) -> bool:
        """Drop outdated tasks from the top of the heap; return False if no task is left."""
        order = self._order
        while order:
            length_s, task = order[0]
            queue = self._tasks.get(task)
            if queue is not None and length_s == -queue.length_s():
                return True
            heappop(order)
        return False
