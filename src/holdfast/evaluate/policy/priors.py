"""Predict a sample's cost: the number of generated tokens, and the time of its metric.

A prediction uses the first of these sources that is available:

1. the same sample (task and number) in an earlier evaluation, usually of the previous checkpoint;
2. the observations of the same task in this run;
3. the length of the prompt and the limits of the request.

Each observation corrects the predictions at once. So a run without history learns while it runs,
and each checkpoint starts with the lengths of the previous one.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

UNKNOWN = -1.0
LIMIT_SHARE = 0.35
"""The assumed share of its token limit that a generation without history uses.

The value affects only the order among tasks.
"""
SPREAD = 2.0
"""The assumed ratio of the 90th percentile of tokens to the median, for a sample without history.

The value corresponds to a log-normal distribution with sigma 0.54.
"""
KNOWN_SPREAD = 1.15
"""The same ratio for a sample whose length at the previous checkpoint is known."""
METRIC_S = 0.5
"""The assumed seconds of a metric without history."""
WEIGHT = 4.0
"""The weight of the earlier estimate, as a number of observations."""


class TaskHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the observations of one task in columns.

    `numbers` is int32, and the other columns are float32, all little endian; -1 means unknown.

    Attributes:
        task: the name of the task.
        numbers: the index of each sample in the task.
        new_tokens: the number of generated tokens per generating request of each sample, as a mean.
        metric_s: the seconds of each sample's metric.
    """

    task: str
    numbers: bytes
    new_tokens: bytes
    metric_s: bytes


class Tokens(NamedTuple):
    """The predicted number of new tokens of one request: the median and the 90th percentile."""

    q50: float
    q90: float


def encode_history(history: Sequence[TaskHistory]) -> bytes:
    """Encode a history as JSON with its columns in base64, about 16 bytes per sample."""
    return msgspec.json.encode(history)


def decode_history(body: bytes) -> list[TaskHistory]:
    """Decode a history that `encode_history` encoded.

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
    """Hold the last observation of each sample of a task.

    Also hold the sums of observed and expected tokens, whose ratio corrects predictions.
    """

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
    """Predict the costs of samples of one suite; tasks have the numbers that `events` use."""

    def __init__(self, task_names: Sequence[str] = ()) -> None:
        """Start without observations; `task_names` are the names in the history, by task number."""
        self._names = list(task_names)
        self._tasks: list[_Task] = [_Task() for _ in task_names]

    @classmethod
    def from_history(cls, history: Iterable[TaskHistory], task_names: Sequence[str]) -> "Priors":
        """Create priors from a history.

        If a task occurs several times in the history, the last value of each sample counts.
        """
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
        """Return the history with all observations; newer observations replace earlier ones."""
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
        """Return the tokens per request that the same sample generated before; -1 if unknown."""
        tokens = self._task(task).tokens
        return tokens[number] if number < len(tokens) else UNKNOWN

    def tokens(self, task: int, number: int, max_new_tokens: int) -> Tokens:
        """Predict the tokens of a sample's request; the caller must still apply `correction`."""
        if max_new_tokens == 0:
            return Tokens(0.0, 0.0)
        known = self.known_tokens(task, number)
        if known >= 0:
            known = min(known, max_new_tokens)
            return Tokens(known, min(known * KNOWN_SPREAD, max_new_tokens))
        q50 = max_new_tokens * LIMIT_SHARE
        return Tokens(q50, min(q50 * SPREAD, max_new_tokens))

    def metric_s(self, task: int, number: int) -> float:
        """Predict the seconds of a sample's metric.

        The prediction is the sample's earlier time; without one, the mean time of the task's
        metrics so far.
        """
        seen = self._task(task)
        if number < len(seen.metric_s) and seen.metric_s[number] >= 0:
            return seen.metric_s[number]
        return self.mean_metric_s(task)

    def mean_metric_s(self, task: int) -> float:
        """Return the mean seconds of the task's metrics so far."""
        seen = self._task(task)
        return (seen.metric_sum_s + METRIC_S) / (seen.metric_count + 1)

    def correction(self, task: int) -> float:
        """Return the factor by which to multiply the predicted tokens of a task's open samples.

        The factor is the ratio of generated tokens to expected tokens. The expected tokens include
        the tokens of requests without an answer. Otherwise every new task would look short, because
        short answers arrive first. This is the usual correction for a censored sample.
        """
        seen = self._task(task)
        if seen.expected_tokens <= 0:
            return 1.0
        prior = seen.waiting_tokens + WEIGHT * seen.expected_tokens / seen.answers
        return (seen.seen_tokens + prior) / (seen.expected_tokens + prior)

    def ask(self, task: int, expected_tokens: float) -> None:
        """Count a request that was sent to an engine, with its expected tokens."""
        self._task(task).waiting_tokens += expected_tokens

    def unask(self, task: int, expected_tokens: float) -> None:
        """Stop counting a request that an engine returned without an answer."""
        seen = self._task(task)
        seen.waiting_tokens = max(0.0, seen.waiting_tokens - expected_tokens)

    def observe_tokens(
        self, task: int, number: int, expected_tokens: float, new_tokens: int
    ) -> None:
        """Record how many tokens the answer to a sample's request has."""
        seen = self._task(task)
        if expected_tokens > 0:
            seen.answers += 1
            seen.seen_tokens += new_tokens
            seen.expected_tokens += expected_tokens
            _put(seen.tokens, number, new_tokens)

    def observe_metric(self, task: int, number: int, metric_s: float) -> None:
        """Record how long a sample's metric took."""
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
