"""Define the interface between Holdfast and a benchmark harness.

All of it runs in the harness host's processes, without a GPU.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from holdfast.evaluate.types.requests import Answer, Request
from holdfast.evaluate.types.suite import TaskEntry


class SampleRequests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the requests of one sample (one document of a task), in the harness's order.

    Attributes:
        sample: the number of the document within the task.
        metric_key: the content key of the metric; `Harness.measure` runs once all requests are
            answered. Empty if the client computes its metric itself.
    """

    sample: int
    requests: list[Request]
    metric_key: bytes = b""


class AnsweredSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold a sample with all answers, and with its metric if one was requested.

    `measured` is the JSON from `Harness.measure`; empty without a metric. `error` is the reason why
    the sample could not be answered.
    """

    sample: int
    answers: list[Answer]
    measured: bytes = b""
    error: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe the model and its engines for a client.

    `tokenizer` is a folder with config.json and tokenizer files; empty if the engine takes text.
    `digest` is the digest of the weights' content. `numerics` names all else that the answers' bits
    depend on.
    """

    model: int
    name: str
    tokenizer: str
    max_length: int
    digest: str = ""
    numerics: str = ""
    takes_text: bool = False


class EngineClient(Protocol):
    """Send requests to the engines, for one task of one model."""

    facts: ModelFacts

    def ask(self, samples: Sequence[SampleRequests]) -> "Sequence[AnsweredSample]":
        """Submit samples and wait until all are answered and measured.

        Returns:
            The samples, in the given order.

        Raises:
            EvaluationError: a sample cannot be answered, or the evaluation is over.
        """
        ...

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """Submit one sample and wait, for an asynchronous harness; many may wait at a time."""
        ...


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the result of a task, in the harness's own form.

    Attributes:
        results: the harness's results as JSON values; for lm-eval its results object of this
            entry alone.
        samples_file: the file with the logged samples (JSON lines), relative to the
            evaluation's folder; empty if not logged.
        notes: sentences on why a score may differ from the harness's own.
    """

    results: dict[str, Any]
    samples_file: str = ""
    notes: list[str] = []


class Harness(Protocol):
    """Adapt a benchmark harness.

    `prepare` runs once in the host's parent process, all else in processes forked from it.
    """

    name: str

    def version(self) -> str:
        """Return the version of the harness's package."""
        ...

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """Import the harness and find the tasks.

        Raises:
            BadUse: a task does not exist (with the nearest names), or needs a feature that
                Holdfast lacks (a container).
        """
        ...

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        """Run one entry to its scores, blocking, in a process of its own.

        Args:
            entry: the task.
            client: the connection for requests.
            folder: the evaluation's folder, for files that the result names.
        """
        ...

    def measure(
        self, entry: TaskEntry, sample: int, answers: Sequence[Answer], facts: ModelFacts
    ) -> bytes:
        """Compute one sample's metric as JSON for `run`, in a process of its own, on any node."""
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """A harness with a slow first use, which runs once before the tasks' processes are forked."""

    def rehearse(self) -> None:
        """Import and run once the parts that every forked process needs; called after `prepare`."""
        ...
