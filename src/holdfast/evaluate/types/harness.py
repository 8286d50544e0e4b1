"""Define the interface between Holdfast and a benchmark harness.

All implementations run in processes of the harness host, without a GPU.
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
        sample: the document's index within the task.
        metric_key: the content key of the sample's metric: once all requests are answered,
            `Harness.measure` computes the metric. Empty if the client computes the metric itself.
    """

    sample: int
    requests: list[Request]
    metric_key: bytes = b""


class AnsweredSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold a sample with all its answers, and with its metric if the sample has a `metric_key`.

    `measured` is the JSON that `Harness.measure` returned; empty without a metric. `error` is the
    reason why the sample could not be answered.
    """

    sample: int
    answers: list[Answer]
    measured: bytes = b""
    error: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe the model and its engines to a client.

    `tokenizer` is the path of a folder with config.json and the tokenizer's files; empty if the
    engine tokenizes text itself. `digest` is the digest of the weights' content. `numerics` names
    everything else that the bits of an answer depend on, except the request.
    """

    model: int
    name: str
    tokenizer: str
    max_length: int
    digest: str = ""
    numerics: str = ""
    takes_text: bool = False


class EngineClient(Protocol):
    """Send the requests of one task of one model to the engines."""

    facts: ModelFacts

    def ask(self, samples: Sequence[SampleRequests]) -> "Sequence[AnsweredSample]":
        """Submit samples and wait until all of them are answered and measured.

        Returns:
            The answered samples, in the given order.

        Raises:
            EvaluationError: a sample cannot be answered, or the evaluation is over.
        """
        ...

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """Submit one sample and wait for its answers.

        An asynchronous harness may wait for many samples at the same time.
        """
        ...


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the result of a task, in the harness's own form.

    Attributes:
        results: the harness's results as JSON values; for lm-eval, the results object of a run with
            this entry only.
        samples_file: the path of the file with the logged samples (JSON lines), relative to the
            evaluation's folder; empty if samples are not logged.
        notes: sentences, each with a reason why a score may differ from the harness's own score.
    """

    results: dict[str, Any]
    samples_file: str = ""
    notes: list[str] = []


class Harness(Protocol):
    """Adapt a benchmark harness.

    `prepare` runs once in the host's parent process. The other methods run in processes forked from
    the parent.
    """

    name: str

    def version(self) -> str:
        """Return the version of the harness's package."""
        ...

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """Import the harness and find the tasks.

        Raises:
            BadUse: a task does not exist (the message suggests similar names), or it needs a
                feature that Holdfast lacks, such as a container.
        """
        ...

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        """Run one entry of the suite until its scores are computed.

        The call blocks; the caller runs it in a separate process.

        Args:
            entry: the task.
            client: sends the task's requests to the engines.
            folder: the evaluation's folder, for the files that the result refers to.
        """
        ...

    def measure(
        self, entry: TaskEntry, sample: int, answers: Sequence[Answer], facts: ModelFacts
    ) -> bytes:
        """Compute the metric of one sample and return the metric as JSON.

        The caller runs this in a separate process, on any node; `run` receives the JSON with the
        sample's answers.
        """
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """A harness whose first use is slow, so it runs once before the tasks' processes are forked."""

    def rehearse(self) -> None:
        """Import and run once all parts that every forked process needs; called after `prepare`."""
        ...
