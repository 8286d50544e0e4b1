"""What a sample will cost: how many tokens an engine will generate for it, and how long its metric will take.

Three sources, the better first: the very same sample (task and number) in an earlier evaluation, above all that of the
previous checkpoint; what was seen of its task so far in this one; prompt length and limits. What is observed corrects
the rest at once, so that a run without history learns as it goes, and a checkpoint evaluated after another has that
one's lengths.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

UNKNOWN = -1.0
LIMIT_SHARE = 0.35
"""Of its limit, what a generation is taken to need where nothing is known. The order among tasks is all it decides."""
SPREAD = 2.0
"""Tokens at the 90th percentile over those at the median, where nothing is known: a log-normal of sigma 0.54."""
KNOWN_SPREAD = 1.15
"""The same for a sample whose length at the previous checkpoint is known."""
METRIC_S = 0.5
"""A metric of which nothing is known."""
WEIGHT = 4.0
"""As many observations does what was believed before count for."""


class TaskHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one task, in columns: `numbers` int32, the others float32, little endian; -1 is unknown.

    Attributes:
        task: its name.
        numbers: the samples' places in the task.
        new_tokens: generated for a sample, a mean over its requests that generate.
        metric_s: seconds of its metric.
    """

    task: str
    numbers: bytes
    new_tokens: bytes
    metric_s: bytes


class Tokens(NamedTuple):
    """New tokens of one request: the median and the 90th percentile."""

    q50: float
    q90: float


def encode_history(history: Sequence[TaskHistory]) -> bytes:
    """A history as JSON (columns in base64): about 16 bytes a sample."""
    return msgspec.json.encode(history)


def decode_history(body: bytes) -> list[TaskHistory]:
    """The history of `encode_history`.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    history = msgspec.json.decode(body, type=list[TaskHistory])
    for task in history:
        if (
            not len(task.numbers) == len(task.new_tokens) == len(task.metric_s)
            or len(task.numbers) % 4
        ):
            raise msgspec.ValidationError(f"The columns of task {task.task!r} differ in length.")
    return history


class _Task:
    """Of one task: per sample what was seen last, and of all the ratio of what came to what was expected."""

    __slots__ = ("answers", "expected_tokens", "metric_count", "metric_s", "metric_sum_s", "seen_tokens", "tokens",
                 "waiting_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.tokens = array("f")
        self.metric_s = array("f")
        self.answers = 0
        self.seen_tokens = 0.0
        self.expected_tokens = 0.0
        self.waiting_tokens = 0.0
        self.metric_sum_s = 0.0
        self.metric_count = 0


class Priors:
    """Predictions for the tasks of one suite; tasks are numbered as in `events`, and named for the history."""

    def __init__(self, task_names: Sequence[str] = ()) -> None:
        """Know nothing but the tasks' names, by number."""
        self._names = list(task_names)
        self._tasks: list[_Task] = [_Task() for _ in task_names]

    @classmethod
    def from_history(cls, history: Iterable[TaskHistory], task_names: Sequence[str]) -> "Priors":
        """Know what was seen before; of one task given twice the later entry holds, sample by sample."""
        priors = cls(task_names)
        by_name = {name: number for number, name in enumerate(task_names)}
        for past in history:
            if (task := by_name.get(past.task)) is None:
                continue
            numbers, tokens, metrics = (
                array("i", past.numbers),
                array("f", past.new_tokens),
                array("f", past.metric_s),
            )
            for number, new_tokens, metric_s in zip(numbers, tokens, metrics, strict=True):
                priors._record(task, number, new_tokens, metric_s)
        return priors

    def history(self) -> list[TaskHistory]:
        """All that is known now, that of this run before that of earlier ones."""
        found = []
        for name, task in zip(self._names, self._tasks, strict=True):
            size = max(len(task.tokens), len(task.metric_s))
            tokens, metric_s = array("f", task.tokens), array("f", task.metric_s)
            _grow(tokens, size)
            _grow(metric_s, size)
            known = [
                number for number in range(size) if tokens[number] >= 0 or metric_s[number] >= 0
            ]
            found.append(
                TaskHistory(
                    task=name,
                    numbers=array("i", known).tobytes(),
                    new_tokens=array("f", (tokens[number] for number in known)).tobytes(),
                    metric_s=array("f", (metric_s[number] for number in known)).tobytes(),
                )
            )
        return [task for task in found if task.numbers]

    def known_tokens(self, task: int, number: int) -> float:
        """What the same sample generated before, a request; -1 where that is not known."""
        tokens = self._task(task).tokens
        return tokens[number] if number < len(tokens) else UNKNOWN

    def tokens(self, task: int, number: int, max_new_tokens: int) -> Tokens:
        """What one request of a sample will generate; `correction` has yet to be applied to it."""
        if max_new_tokens == 0:
            return Tokens(0.0, 0.0)
        known = self.known_tokens(task, number)
        if known >= 0:
            known = min(known, max_new_tokens)
            return Tokens(known, min(known * KNOWN_SPREAD, max_new_tokens))
        q50 = max_new_tokens * LIMIT_SHARE
        return Tokens(q50, min(q50 * SPREAD, max_new_tokens))

    def metric_s(self, task: int, number: int) -> float:
        """How long a sample's metric will take: its own time before, else its task's mean so far."""
        seen = self._task(task)
        if number < len(seen.metric_s) and seen.metric_s[number] >= 0:
            return seen.metric_s[number]
        return self.mean_metric_s(task)

    def mean_metric_s(self, task: int) -> float:
        """The mean time of a task's metrics so far."""
        seen = self._task(task)
        return (seen.metric_sum_s + METRIC_S) / (seen.metric_count + 1)

    def correction(self, task: int) -> float:
        """By what to multiply the predicted tokens of a task's samples that are not answered yet.

        The ratio of what came to what was expected. Answers that are still out count as expected: the short ones come
        first, and without that (a censored sample) every task would look short as long as it is new.
        """
        seen = self._task(task)
        if seen.expected_tokens <= 0:
            return 1.0
        prior = seen.waiting_tokens + WEIGHT * seen.expected_tokens / seen.answers
        return (seen.seen_tokens + prior) / (seen.expected_tokens + prior)

    def ask(self, task: int, expected_tokens: float) -> None:
        """A request was given to an engine."""
        self._task(task).waiting_tokens += expected_tokens

    def unask(self, task: int, expected_tokens: float) -> None:
        """A request came back from an engine unanswered."""
        seen = self._task(task)
        seen.waiting_tokens = max(0.0, seen.waiting_tokens - expected_tokens)

    def observe_tokens(
        self, task: int, number: int, expected_tokens: float, new_tokens: int
    ) -> None:
        """A request of a sample was answered."""
        seen = self._task(task)
        if expected_tokens > 0:
            seen.answers += 1
            seen.seen_tokens += new_tokens
            seen.expected_tokens += expected_tokens
            _put(seen.tokens, number, new_tokens)

    def observe_metric(self, task: int, number: int, metric_s: float) -> None:
        """A sample's metric took so long."""
        seen = self._task(task)
        seen.metric_sum_s += metric_s
        seen.metric_count += 1
        _put(seen.metric_s, number, metric_s)

    def _record(self, task: int, number: int, new_tokens: float, metric_s: float) -> None:
        seen = self._task(task)
        if new_tokens >= 0:
            _put(seen.tokens, number, new_tokens)
        if metric_s >= 0:
            _put(seen.metric_s, number, metric_s)
            seen.metric_sum_s += metric_s
            seen.metric_count += 1

    def _task(self, task: int) -> _Task:
        tasks = self._tasks
        if task >= len(tasks):
            for number in range(len(tasks), task + 1):
                tasks.append(_Task())
                self._names.append(f"task {number}")
        return tasks[task]


def _grow(column: "array[float]", size: int) -> None:
    if len(column) < size:
        column.extend([UNKNOWN] * max(size - len(column), len(column) // 8))


def _put(column: "array[float]", number: int, value: float) -> None:
    _grow(column, number + 1)
    column[number] = value
