"""The seam between Holdfast and a benchmark harness. All of it runs in the harness host's processes, without a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from holdfast.evaluate.types.requests import Answer, Request
from holdfast.evaluate.types.suite import TaskEntry


class SampleRequests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of one sample (one document of a task), in the harness's order.

    Attributes:
        sample: number of the document within the task.
        metric_key: content key of its metric: `Harness.measure` is run, once, when all requests are answered; empty
            where the client itself computes what it needs.
    """

    sample: int
    requests: list[Request]
    metric_key: bytes = b""


class AnsweredSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample whose requests are all answered and whose metric, if one was asked for, is computed.

    `measured` is what `Harness.measure` returned, as JSON; empty without one. `error`: it could not be answered.
    """

    sample: int
    answers: list[Answer]
    measured: bytes = b""
    error: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client must know of the model and the engines that serve it.

    `tokenizer` is a folder with config.json and tokenizer files (empty: the engine takes text); `digest` is the
    weights' content; `numerics` what else the answers' bits depend on.
    """

    model: int
    name: str
    tokenizer: str
    max_length: int
    digest: str = ""
    numerics: str = ""
    takes_text: bool = False


class EngineClient(Protocol):
    """A client's way to the engines, for one task of one model."""

    facts: ModelFacts

    def ask(self, samples: Sequence[SampleRequests]) -> "Sequence[AnsweredSample]":
        """Submit samples and wait until all are answered (and measured); in the order given.

        Raises:
            EvaluationError: a sample cannot be answered, or the evaluation is over.
        """
        ...

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """The same for one sample, for a harness that is asynchronous; many may wait at a time."""
        ...


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task came to, in the harness's own form.

    Attributes:
        results: the harness's results as JSON values; for lm-eval its own results object of this entry alone.
        samples_file: where the samples were logged (JSON lines), relative to the evaluation's folder; empty if not.
        notes: why a score may differ from the harness's own, a sentence each.
    """

    results: dict[str, Any]
    samples_file: str = ""
    notes: list[str] = []


class Harness(Protocol):
    """A benchmark harness. `prepare` runs once in the host's parent; the rest in processes forked from it."""

    name: str

    def version(self) -> str:
        """The harness's version, as its package says it."""
        ...

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """Import the harness and find the tasks.

        Raises:
            BadUse: a task is not there (with the nearest names), or needs what Holdfast does not give (a container).
        """
        ...

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        """Run one entry to its scores: build all requests, ask, compute. Blocks; in a process of its own.

        Args:
            entry: the task.
            client: how it asks.
            folder: the evaluation's, for files that the result names.
        """
        ...

    def measure(
        self, entry: TaskEntry, sample: int, answers: Sequence[Answer], facts: ModelFacts
    ) -> bytes:
        """The metric of one sample, as JSON that `run` will understand; in a process of its own, on any node."""
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """A harness whose first use is slow, so that it is done once, before the processes of tasks are forked."""

    def rehearse(self) -> None:
        """Import and run once what every forked process would need first; called after `prepare`."""
        ...
