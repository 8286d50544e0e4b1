"""Predict a sample's cost: the generated tokens, and the time of its metric.

There are three sources, the better first: the same sample (task and number) in an earlier
evaluation, above all of the previous checkpoint; the task's observations in this run; prompt length
and limits. Each observation corrects the predictions at once: a run without history learns as it
proceeds, and each checkpoint starts with the lengths of the previous one.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

UNKNOWN = -1.0
LIMIT_SHARE = 0.35
"""The assumed share of its limit that an unknown generation needs; only the order among tasks
depends on it."""
SPREAD = 2.0
"""Tokens at the 90th percentile over the median for an unknown sample: a log-normal of sigma
0.54."""
KNOWN_SPREAD = 1.15
"""The same ratio for a sample with a known length at the previous checkpoint."""
METRIC_S = 0.5
"""Seconds of an unknown metric."""
WEIGHT = 4.0
"""The weight of the earlier estimate, in observations."""


class TaskHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the observations of one task in columns.

    `numbers` is int32, the others are float32, little endian; -1 is unknown.

    Attributes:
        task: the name of the task.
        numbers: the samples' places in the task.
        new_tokens: the generated tokens of a sample, as a mean over its generating requests.
        metric_s: seconds of the sample's metric.
    """

    task: str
    numbers: bytes
    new_tokens: bytes
    metric_s: bytes


class Tokens(NamedTuple):
    """The new tokens of one request: the median and the 90th percentile."""

    q50: float
    q90: float


def encode_history(history: Sequence[TaskHistory]) -> bytes:
    """Encode a history as JSON (columns in base64), about 16 bytes a sample."""
    return msgspec.json.encode(history)


def decode_history(body: bytes) -> list[TaskHistory]:
    """Decode a history of `encode_history`.

    Raises:
        msgspec.DecodeError: the bytes are not a history.
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
    """Hold a task's last observation by sample, and the sums for the ratio of seen to expected."""

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
    """Predict costs for the tasks of one suite, numbered as in `events`, named for the history."""

    def __init__(self, task_names: Sequence[str] = ()) -> None:
        """Start with the tasks' names, by number, and without observations."""
        self._names = list(task_names)
        self._tasks: list[_Task] = [_Task() for _ in task_names]

    @classmethod
    def from_history(cls, history: Iterable[TaskHistory], task_names: Sequence[str]) -> "Priors":
        """Start from a history; for a task with several entries, the last value of a sample counts."""
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
        """Return all observations; newer ones replace earlier ones."""
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
        """Return the tokens that the same sample generated before, per request; -1 if unknown."""
        tokens = self._task(task).tokens
        return tokens[number] if number < len(tokens) else UNKNOWN

    def tokens(self, task: int, number: int, max_new_tokens: int) -> Tokens:
        """Predict the tokens of a sample's request, before `correction` is applied."""
        if max_new_tokens == 0:
            return Tokens(0.0, 0.0)
        known = self.known_tokens(task, number)
        if known >= 0:
            known = min(known, max_new_tokens)
            return Tokens(known, min(known * KNOWN_SPREAD, max_new_tokens))
        q50 = max_new_tokens * LIMIT_SHARE
        return Tokens(q50, min(q50 * SPREAD, max_new_tokens))

    def metric_s(self, task: int, number: int) -> float:
        """Predict the seconds of a sample's metric: its earlier time, else its task's mean so far."""
        seen = self._task(task)
        if number < len(seen.metric_s) and seen.metric_s[number] >= 0:
            return seen.metric_s[number]
        return self.mean_metric_s(task)

    def mean_metric_s(self, task: int) -> float:
        """Return the mean seconds of a task's metrics so far."""
        seen = self._task(task)
        return (seen.metric_sum_s + METRIC_S) / (seen.metric_count + 1)

    def correction(self, task: int) -> float:
        """Return the factor for the predicted tokens of a task's open samples.

        The factor is the ratio of generated to expected tokens. Open requests count as expected:
        short answers arrive first, and without this correction (for a censored sample) every new
        task would look short.
        """
        seen = self._task(task)
        if seen.expected_tokens <= 0:
            return 1.0
        prior = seen.waiting_tokens + WEIGHT * seen.expected_tokens / seen.answers
        return (seen.seen_tokens + prior) / (seen.expected_tokens + prior)

    def ask(self, task: int, expected_tokens: float) -> None:
        """Count a request that was sent to an engine."""
        self._task(task).waiting_tokens += expected_tokens

    def unask(self, task: int, expected_tokens: float) -> None:
        """Count a request that an engine returned unanswered."""
        seen = self._task(task)
        seen.waiting_tokens = max(0.0, seen.waiting_tokens - expected_tokens)

    def observe_tokens(
        self, task: int, number: int, expected_tokens: float, new_tokens: int
    ) -> None:
        """Record the answer to a sample's request."""
        seen = self._task(task)
        if expected_tokens > 0:
            seen.answers += 1
            seen.seen_tokens += new_tokens
            seen.expected_tokens += expected_tokens
            _put(seen.tokens, number, new_tokens)

    def observe_metric(self, task: int, number: int, metric_s: float) -> None:
        """Record the time of a sample's metric."""
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
