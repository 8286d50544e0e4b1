"""A queue of requests, the longest remaining path first, in amortised constant time.

Requests lie in buckets of nearly equal length, a set of buckets for each task. What is learned of a task while it runs
multiplies all its lengths, so it moves the task among the others and leaves its own order as it is.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

Entry = int | tuple[int, ...]
"""A request, or several that go to an engine together because one forward answers them."""

BUCKETS_PER_E = 12
"""Buckets for each factor of e: lengths within one differ by 8.7% at most."""


class Bucket:
    """Entries of about one length, and the means of what they cost, as it was expected when they were added."""

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
    """What is to be asked of one model's engines: `count` entries."""

    __slots__ = ("_front", "_order", "_tasks", "count")

    def __init__(self) -> None:
        self.count = 0
        self._front: deque[Entry] = deque()
        self._tasks: dict[int, _TaskQueue] = {}
        self._order: list[
            tuple[float, int]
        ] = []  # a heap of (negated length of its longest, task), exact at its top

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
        """Enter what will take `length_s` from when it begins; of one length the last that was added comes first."""
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
        """Enter what was out before and came back: it comes before all else."""
        self.count += 1
        self._front.append(entry)

    def longest_s(self) -> float:
        """How long the next entry will take; infinite for what came back, 0 if there is nothing."""
        if self._front:
            return math.inf
        return -self._order[0][0] if self._settle() else 0.0

    def pop(self) -> Entry:
        """The next entry.

        Raises:
            IndexError: there is none.
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
        """The next entry, left where it is."""
        if self._front:
            return self._front[0]
        if not self._settle():
            return None
        queue = self._tasks[self._order[0][1]]
        return queue.buckets[-queue.levels[0]].entries[-1]

    def review(self, factor: Callable[[int], float]) -> None:
        """Order the tasks anew: the lengths of a task are `factor(task)` times those that were given."""
        for task, queue in self._tasks.items():
            queue.factor = factor(task)
        self._order = [(-queue.length_s(), task) for task, queue in self._tasks.items()]
        heapify(self._order)

    def buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Each task's buckets; not what came back."""
        for task, queue in self._tasks.items():
            for bucket in queue.buckets.values():
                yield task, bucket

    def front(self) -> Iterator[Entry]:
        """What came back."""
        return iter(self._front)

    def clear(self) -> None:
        """Forget everything."""
        self.count = 0
        self._front.clear()
        self._tasks.clear()
        self._order.clear()

    def _settle(self) -> bool:
        """Drop what is out of date from the top of the order; whether anything is left."""
        order = self._order
        while order:
            length_s, task = order[0]
            queue = self._tasks.get(task)
            if queue is not None and length_s == -queue.length_s():
                return True
            heappop(order)
        return False
