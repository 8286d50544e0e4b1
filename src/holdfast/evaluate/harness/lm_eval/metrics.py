"""Between lm-eval's evaluator and the engines: the requests of an entry, their answers, and metrics computed elsewhere.

The evaluator builds every task's instances, then runs one type of request after another. At its first call everything
is known, and `Exchange` asks for everything: grouped by document, whatever the type.

The metric of one document is computed elsewhere, and taken only where it is exactly what lm-eval is computing. The
evaluator runs as it is: it calls a task's `process_results` with a document and its filtered responses. For tasks whose
metrics may take long, that method is wrapped by a memo of what `measure` found for the very same document and
the very same responses (by a digest of each); for anything else the harness computes. So a memo can only save time.

Which tasks: those that generate, and whose metrics are not all lm-eval's own (those take microseconds). That is any
task with a function of its own for results or a metric, with a metric of Hugging Face evaluate, or that runs code.
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
        self.is_sampled = False
        """Whether a request draws its answer at random."""
        self.splits_one_input = False
        """Whether two continuations of different length ask about one input, which lm-eval's collator mixes up."""
        self._continuation_bytes: dict[bytes, int] = {}

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
    """Each task with the sample number of its first document: they are counted through all tasks of an entry.

    All documents count, also those beyond a limit, so that a number means the same document under every limit.
    """
    first = 0
    for task in tasks.values():
        yield first, task
        first += len(
            getattr(task, "task_docs", None) or task.eval_docs
        )  # the latter makes them anew


def is_streamed(task: "Task") -> bool:
    """Whether a task's metrics are worth computing elsewhere, as each document is answered."""
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "generate_until":
        return False
    if getattr(task, "UNSAFE_CODE", False) or callable(task.config.process_results):
        return True
    return not all(
        name in METRIC_REGISTRY and METRIC_REGISTRY[name] is function
        for name, function in task._metric_fn_list.items()
    )


class StreamedMetrics:
    """The memo of one entry's metrics, in its client.

    Args:
        stands_for: what a metric depends on besides its task, document and answers: versions, tokenizer.
        is_wanted: False where the evaluator computes no metrics.
    """

    def __init__(self, stands_for: bytes, *, is_wanted: bool = True) -> None:
        self._stands_for, self._is_wanted = stands_for, is_wanted
        self._found: dict[tuple[str, str, str], tuple[Any, Any]] = {}
        self._fingerprints: dict[str, bytes] = {}

    def wrap(self, task: "Task") -> None:
        """Let a streamed task look into the memo first."""
        if self._is_wanted and is_streamed(task):
            task.process_results = self._or_found(task, task.process_results)

    def key(
        self, task: "Task", instances: "Sequence[Instance]", requests: Sequence[Request]
    ) -> bytes:
        """The content key of a document's metric; empty for a task that is not streamed.

        It stands for: the packages' versions, the tokenizer, the task's config, the document and the keys of its
        requests. Not for the answers and the files that the metric reads: a journal keeps a metric under those too.
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
        """Keep what `measure` returned for a document of the task; empty is nothing."""
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
    """What `process_results` makes of one document's answers, for each filter; empty if it cannot be said exactly.

    Only what the metric looks at is made: the document's instances with an empty prompt, which no response depends on.
    An error of the metric is left to the client, which meets it again where lm-eval would.
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
        asked = _digest_of_document(doc), _digest_of_results(results)
        aggregations = dict(task._aggregation_list)
        value = task.process_results(doc, results)
        grown = _grown(task, aggregations)
        # A function that changes what it is given changes what lm-eval logs: it must be called there.
        if (
            "" in asked
            or grown is None
            or asked != (_digest_of_document(doc), _digest_of_results(results))
        ):
            return b""
        found.append([*asked, value, grown])
    try:
        return exact_json.encode(found)
    except exact_json.NotExact:
        return b""


def _grown(task: "Task", before: dict[str, Any]) -> dict[str, Any] | None:
    """What `process_results` added to the task by the way: for each new metric the one whose aggregation it took.

    lm-eval does so where a metric returns several values ("pass_at_k" becomes "pass@1", ...).
    """
    grown = {}
    for name in task._aggregation_list.keys() - before.keys():
        # Removed: the next document is to find the task as this one did, for which of them comes first is chance.
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
    # Without its metadata, which names folders of this machine.
    stated = {key: value for key, value in task.dump_config().items() if key != "metadata"}
    config = json.dumps(stated, default=handle_non_serializable, sort_keys=True)
    digest = hashlib.blake2b(config.encode("utf-8", "surrogatepass"), digest_size=16)
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _digest_of_document(doc: Any) -> str:
    # As the evaluator names documents. What JSON cannot hold goes in as its repr, which at worst differs each time.
    text = json.dumps(doc, default=handle_non_serializable, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _digest_of_results(results: Any) -> str:
    try:
        return hashlib.blake2b(exact_json.encode(results), digest_size=16).hexdigest()
    except exact_json.NotExact:
        return ""
