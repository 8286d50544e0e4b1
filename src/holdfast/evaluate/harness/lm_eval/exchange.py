"""All requests of an entry asked at once, and the answers handed to lm-eval's evaluator as it calls for them.

The evaluator builds every task's instances, then runs one type of request after another. At its first call everything
is known, and everything is asked: grouped by document, whatever the type.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import EngineClient, SampleRequests
from holdfast.evaluate.types.requests import Answer, Request, keyed

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

    from holdfast.evaluate.harness.lm_eval.metrics import StreamedMetrics


class RemoteLM(Protocol):
    """`EngineLM` or `TextLM`."""

    def requests_of(self, instance: "Instance") -> list[Request]:
        """What an instance asks of a model."""
        ...

    def response(self, instance: "Instance", answers: Sequence[Answer]) -> Any:
        """What the harness makes of the answers."""
        ...


class Exchange:
    """Between one evaluator and the engines. `tasks` is lm-eval's, by name, once it has loaded them."""

    tasks: Mapping[str, "Task"]

    def __init__(self, client: EngineClient, lm: RemoteLM, metrics: "StreamedMetrics") -> None:
        self._client, self._lm, self._metrics = client, lm, metrics
        self._responses: dict[int, deque[Any]] | None = None
        self._repeats: Counter[bytes] = Counter()

    def responses(self, instances: "Sequence[Instance]") -> list[Any]:
        """A response for each; an instance stands there once for each of its repeats."""
        if self._responses is None:
            self._responses = self._ask()
        try:
            return [self._responses[id(instance)].popleft() for instance in instances]
        except (KeyError, IndexError):
            raise EvaluationError(
                "lm-eval asked for something that no task of its own had announced."
            ) from None

    def _ask(self) -> dict[int, deque[Any]]:
        documents = list(self._documents())
        samples, counts = [], []
        for number, task, instances in documents:
            asked = [self._requests(instance) for instance in instances]
            counts.append([[len(requests) for requests in repeats] for repeats in asked])
            requests = [request for repeats in asked for repeat in repeats for request in repeat]
            key = self._metrics.key(task, instances, requests)
            samples.append(SampleRequests(sample=number, requests=requests, metric_key=key))
        answered = self._client.ask(samples)
        responses: dict[int, deque[Any]] = {}
        for (_number, task, instances), repeated, sample in zip(
            documents, counts, answered, strict=True
        ):
            if sample.error:
                raise EvaluationError(sample.error)
            self._metrics.remember(task, sample.measured)
            answers = iter(sample.answers)
            for instance, repeats in zip(instances, repeated, strict=True):
                responses[id(instance)] = deque(
                    self._lm.response(instance, [next(answers) for _ in range(count)])
                    for count in repeats
                )
        return responses

    def _documents(self) -> "Iterator[tuple[int, Task, list[Instance]]]":
        for first, task in numbered(self.tasks):
            documents: dict[int, list[Instance]] = {}
            for instance in task.instances:
                documents.setdefault(instance.doc_id, []).append(instance)
            for document, instances in documents.items():
                yield first + document, task, instances

    def _requests(self, instance: "Instance") -> list[list[Request]]:
        """For each repeat of an instance its requests; those that are sampled differ in `repeat`."""
        requests = self._lm.requests_of(instance)
        return [
            [self._set_apart(request) for request in requests] for _ in range(instance.repeats or 1)
        ]

    def _set_apart(self, request: Request) -> Request:
        chosen = request.sampling
        if chosen is None or chosen.temperature == 0:
            return request
        key = keyed(request).key
        repeat = self._repeats[key]
        self._repeats[key] += 1
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(chosen, repeat=repeat)
        )


def numbered(tasks: "Mapping[str, Task]") -> "Iterator[tuple[int, Task]]":
    """Each task with the sample number of its first document: they are counted through all tasks of an entry.

    All documents count, also those beyond a limit, so that a number means the same document under every limit.
    """
    first = 0
    for task in tasks.values():
        yield first, task
        first += len(
            getattr(task, "task_docs", None) or task.eval_docs
        )  # the latter makes them anew
