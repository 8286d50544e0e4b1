"""Give engines' answers, and metrics computed elsewhere, to lm-eval's evaluator.

The evaluator first builds every task's instances, and then calls the model with one type of request
after another. At the first call all instances exist, and `Exchange` submits the requests of all
types at once, grouped by document.

Slow metrics are computed elsewhere, as soon as a document's answers are there. The evaluator itself
runs unmodified: it calls a task's `process_results` with a document and its filtered responses. For
tasks with slow metrics, a memo wraps this method. The memo returns the result of `measure` if the
document and the responses have the same digests; otherwise the original method computes the metric
in place. So the memo can save time, and cannot change a score.

A task has a memo if it generates text and its metrics are not only lm-eval's own, which take
microseconds. Such a task has its own function for results or its own metric, uses a metric of
Hugging Face's evaluate library, or runs code.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import handle_non_serializable

from holdfast.evaluate.harness import exact_json
from holdfast.evaluate.types.requests import Answer, Request, keyed

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task


from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import EngineClient, SampleRequests

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task


class RemoteLM(Protocol):
    """The methods that `EngineLM` and `TextLM` have in common."""

    def requests_of(self, instance: "Instance") -> list[Request]:
        """Return the requests that answer an instance."""
        ...

    def response(self, instance: "Instance", answers: Sequence[Answer]) -> Any:
        """Return the response to an instance that the harness makes from the answers."""
        ...


class Exchange:
    """Send the requests of one evaluator's run to the engines, and return the responses to it.

    `tasks` are lm-eval's tasks by name; set once they are loaded.
    """

    tasks: Mapping[str, "Task"]

    def __init__(self, client: EngineClient, lm: RemoteLM, metrics: "StreamedMetrics") -> None:
        self._client, self._lm, self._metrics = client, lm, metrics
        self._responses: dict[int, deque[Any]] | None = None
        self._repeats: Counter[bytes] = Counter()
        self.is_sampled = False
        """True if an answer is sampled instead of decoded greedily."""
        self.splits_one_input = False
        """True if one input has continuations of several lengths, which lm-eval mixes up."""
        self._continuation_bytes: dict[bytes, int] = {}

    def responses(self, instances: "Sequence[Instance]") -> list[Any]:
        """Return a response for each item of `instances`.

        The evaluator lists an instance once for each of its repeats.
        """
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
            by_instance = [self._requests(instance) for instance in instances]
            counts.append([[len(requests) for requests in repeats] for repeats in by_instance])
            requests = [
                request for repeats in by_instance for repeat in repeats for request in repeat
            ]
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
        """Return a list of requests for each repeat of an instance.

        The requests of different repeats have a different `repeat` if they are sampled.
        """
        requests = self._lm.requests_of(instance)
        for request in requests:
            if request.prompt and instance.request_type == "loglikelihood":
                given = _digest(request.prompt + request.continuation[:-4])
                length = len(request.continuation)
                if self._continuation_bytes.setdefault(given, length) != length:
                    self.splits_one_input = True
        return [
            [self._set_apart(request) for request in requests] for _ in range(instance.repeats or 1)
        ]

    def _set_apart(self, request: Request) -> Request:
        chosen = request.sampling
        if chosen is None or chosen.temperature == 0:
            return request
        self.is_sampled = True
        key = keyed(request).key
        repeat = self._repeats[key]
        self._repeats[key] += 1
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(chosen, repeat=repeat)
        )


def numbered(tasks: "Mapping[str, Task]") -> "Iterator[tuple[int, Task]]":
    """Yield each task with the sample number of its first document.

    Samples are numbered through all tasks of the entry. Documents beyond a limit count too, so that
    a number means the same document under every limit.
    """
    first = 0
    for task in tasks.values():
        yield first, task
        # Prefer `task_docs`, since `eval_docs` makes the documents again.
        first += len(getattr(task, "task_docs", None) or task.eval_docs)


def is_streamed(task: "Task") -> bool:
    """Return True if a task's metrics are slow, so that they are computed elsewhere."""
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "generate_until":
        return False
    if getattr(task, "UNSAFE_CODE", False) or callable(task.config.process_results):
        return True
    return not all(
        name in METRIC_REGISTRY and METRIC_REGISTRY[name] is function
        for name, function in task._metric_fn_list.items()
    )


class StreamedMetrics:
    """Keep the memo of one entry's metrics, in the process of its client.

    Args:
        stands_for: a digest of packages' versions, model arguments and tokenizer, which a metric
            depends on besides its task, document and answers.
        is_wanted: False if the evaluator computes no metrics.
    """

    def __init__(self, stands_for: bytes, *, is_wanted: bool = True) -> None:
        self._stands_for, self._is_wanted = stands_for, is_wanted
        self._found: dict[tuple[str, str, str], tuple[Any, Any]] = {}
        self._fingerprints: dict[str, bytes] = {}

    def wrap(self, task: "Task") -> None:
        """Let a task with slow metrics look up each result in the memo first."""
        if self._is_wanted and is_streamed(task):
            task.process_results = self._or_found(task, task.process_results)

    def key(
        self, task: "Task", instances: "Sequence[Instance]", requests: Sequence[Request]
    ) -> bytes:
        """Return the content key of a document's metric; empty if the task has no slow metrics.

        The key covers the packages' versions, the tokenizer, the task's config, the document and
        the keys of its requests. The key does not cover the answers and the files that the metric
        reads; the journal adds both.
        """
        if not self._is_wanted or not is_streamed(task):
            return b""
        if task.task_name not in self._fingerprints:
            self._fingerprints[task.task_name] = _fingerprint(task)
        parts = [
            self._stands_for,
            self._fingerprints[task.task_name],
            _digest_of_document(instances[0].doc).encode(),
        ]
        parts += [keyed(request).key for request in requests]
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    def remember(self, task: "Task", measured: bytes) -> None:
        """Store the result that `measure` returned for a document; does nothing if it is empty."""
        if measured:
            for document, results, value, grown in exact_json.decode(measured):
                self._found[task.task_name, document, results] = (value, grown)

    def _or_found(
        self, task: "Task", compute: Callable[[Any, Any], Any]
    ) -> Callable[[Any, Any], Any]:
        def process_results(doc: Any, results: Any) -> Any:
            digest = _digest_of_results(results)
            found = (
                self._found.get((task.task_name, _digest_of_document(doc), digest))
                if digest
                else None
            )
            if found is None:
                return compute(doc, results)
            value, grown = found
            for name, (source, higher_is_better) in grown.items():
                task._aggregation_list.setdefault(name, task._aggregation_list.get(source))
                task._higher_is_better.setdefault(name, higher_is_better)
            return value

        return process_results


def measure(
    task: "Task", document: int, doc: Any, answers: Sequence[Answer], lm: "RemoteLM"
) -> bytes:
    """Apply `process_results` to the answers for one document, once for each filter.

    Only the inputs of the metric are built: the document's instances, with an empty prompt, since
    no response depends on the prompt. An error of the metric is raised; the client then computes
    the metric again and meets the error where lm-eval would.

    Returns:
        The results for the memo; empty if they cannot be encoded exactly or the call had side
        effects.
    """
    metadata = (task.config["task"], document, task.config.repeats)
    built = task.construct_requests(
        doc=doc, ctx="", metadata=metadata, apply_chat_template=False, chat_template=None
    )
    instances: list[Instance] = built if isinstance(built, list) else [built]
    rest = iter(answers)
    for instance in instances:
        instance.resps = [lm.response(instance, [next(rest)]) for _ in range(instance.repeats or 1)]
    for filters in task._filters:
        filters.apply(instances)
    instances.sort(key=lambda instance: instance.idx)
    found = []
    for filter_key in instances[0].filtered_resps:
        results = [instance.filtered_resps[filter_key] for instance in instances]
        key = _digest_of_document(doc), _digest_of_results(results)
        aggregations = dict(task._aggregation_list)
        value = task.process_results(doc, results)
        grown = _grown(task, aggregations)
        # Return nothing for a function that changes its arguments: lm-eval's log shows the change,
        # so the function must run in the client.
        if (
            "" in key
            or grown is None
            or key != (_digest_of_document(doc), _digest_of_results(results))
        ):
            return b""
        found.append([*key, value, grown])
    try:
        return exact_json.encode(found)
    except exact_json.NotExact:
        return b""


def _grown(task: "Task", before: dict[str, Any]) -> dict[str, Any] | None:
    """Return the metrics that `process_results` added to the task.

    lm-eval adds metrics if a metric returns several values (for example, "pass_at_k" adds
    "pass@1").

    Returns:
        For each added metric, the earlier metric with the same aggregation, and True if a higher
        value is better. None if either is unknown.
    """
    grown = {}
    for name in task._aggregation_list.keys() - before.keys():
        # Remove the metric, so that the next document finds the task unchanged: documents come in
        # any order.
        aggregation, higher_is_better = (
            task._aggregation_list.pop(name),
            task._higher_is_better.pop(name, None),
        )
        source = next(
            (known for known, function in before.items() if function is aggregation), None
        )
        grown[name] = (source, higher_is_better)
    return None if any(None in pair for pair in grown.values()) else grown


def _fingerprint(task: "Task") -> bytes:
    # Leave out the metadata, which names folders of this machine.
    stated = {key: value for key, value in task.dump_config().items() if key != "metadata"}
    config = json.dumps(stated, default=handle_non_serializable, sort_keys=True)
    digest = hashlib.blake2b(config.encode("utf-8", "surrogatepass"), digest_size=16)
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _digest_of_document(doc: Any) -> str:
    # Identify the document as the evaluator does. A value that JSON lacks enters by its repr, which
    # may differ each time.
    text = json.dumps(doc, default=handle_non_serializable, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _digest_of_results(results: Any) -> str:
    try:
        return hashlib.blake2b(exact_json.encode(results), digest_size=16).hexdigest()
    except exact_json.NotExact:
        return ""
