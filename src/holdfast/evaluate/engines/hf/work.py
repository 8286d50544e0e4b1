"""Schedule the work of a transformers engine: one request at a time, or many together."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from holdfast.core.phases import phase
from holdfast.evaluate.engines.hf.batching import RunningBatch, plan_scores, score_batch
from holdfast.evaluate.engines.hf.calls import Calls
from holdfast.evaluate.engines.hf.exact import Generation, fault_of, input_of, score
from holdfast.evaluate.engines.hf.sampling import Recipes
from holdfast.evaluate.types.engine import Finished
from holdfast.evaluate.types.requests import Answer, Request

# Errors that concern only one request: tokens beyond the vocabulary, wrong parameters, too little
# memory.
_OF_THE_REQUEST = (RuntimeError, IndexError, ValueError, TypeError)


class Work(ABC):
    """Keep the requests that wait or have begun.

    Requests for log-probabilities with the same input tokens share one forward pass.
    """

    def __init__(self, calls: Calls, recipes: Recipes, max_length: int) -> None:
        self._calls = calls
        self._recipes = recipes
        self._max_length = max_length
        self._scores: dict[bytes, dict[int, Request]] = {}  # waiting log-probabilities, by input
        self._generations: dict[int, Request] = {}
        self._inputs: dict[int, bytes] = {}
        self._begun: dict[int, float] = {}  # id to start time
        self._ended: list[Finished] = []

    def submit(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Add requests; a request that cannot be answered ends in the next `step`."""
        for id_, request in requests:
            if fault := fault_of(request, self._max_length):
                self._begin([id_])
                self._end(id_, None, fault)
            elif request.kind == "loglikelihood":
                packed = self._inputs[id_] = input_of(request, self._max_length)
                self._scores.setdefault(packed, {})[id_] = request
            else:
                self._generations[id_] = request

    def recall(self, ids: Iterable[int]) -> list[int]:
        """Drop the requests that have not begun, and return their ids."""
        given = []
        for id_ in ids:
            if (packed := self._inputs.pop(id_, None)) is not None:
                del self._scores[packed][id_]
                if not self._scores[packed]:
                    del self._scores[packed]
                given.append(id_)
            elif self._generations.pop(id_, None) is not None:
                given.append(id_)
        return given

    def step(self, until_s: float) -> list[Finished]:
        """Work until `time.monotonic()` reaches `until_s`; the last forward pass may end later."""
        while (self._scores or self._generations or self._begun) and time.monotonic() < until_s:
            self._go_on(until_s)
        ended, self._ended = self._ended, []
        return ended

    @abstractmethod
    def _go_on(self, until_s: float) -> None:
        """Do the next piece of work: one forward pass, or steps of a generation until `until_s`."""

    def _begin(self, ids: Iterable[int]) -> None:
        now_s = time.monotonic()
        for id_ in ids:
            self._begun[id_] = now_s
            self._inputs.pop(id_, None)

    def _end(self, id_: int, answer: Answer | None, error: str = "") -> None:
        now_s = time.monotonic()
        self._ended.append(
            Finished(
                id=id_, answer=answer, error=error, started_s=self._begun.pop(id_), finished_s=now_s
            )
        )

    def _fail(self, ids: Iterable[int], error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError):
            raise error  # the process has lost the device, and with it all requests
        for id_ in ids:
            self._end(id_, None, f"{type(error).__name__}: {error}")

    def _begin_generation(self) -> tuple[int, Generation] | None:
        id_, request = next(iter(self._generations.items()))
        del self._generations[id_]
        self._begin([id_])
        try:
            return id_, Generation.begin(self._calls, self._recipes, request, self._max_length)
        except _OF_THE_REQUEST as error:
            self._fail([id_], error)
            return None


class OneByOne(Work):
    """Answer one input per forward pass, for exact mode: answers do not depend on each other."""

    _under_way: tuple[int, Generation] | None = None

    def _go_on(self, until_s: float) -> None:
        if self._under_way is None and self._scores:
            packed = next(iter(self._scores))
            self._score(packed, self._scores.pop(packed))
            return
        under_way, self._under_way = self._under_way or self._begin_generation(), None
        if under_way is None:
            return
        id_, generation = under_way
        try:
            answer = generation.advance(until_s)
        except _OF_THE_REQUEST as error:
            self._fail([id_], error)
            return
        if answer is None:
            self._under_way = under_way
        else:
            self._end(id_, answer)

    def _score(self, packed: bytes, requests: dict[int, Request]) -> None:
        self._begin(requests)
        try:
            with phase("prefill"):
                answers = score(
                    self._calls, packed, [request.continuation for request in requests.values()]
                )
        except _OF_THE_REQUEST as error:
            self._fail(requests, error)
            return
        for id_, answer in zip(requests, answers, strict=True):
            self._end(id_, answer)


class Together(Work):
    """Answer requests in batches, for free mode.

    Log-probabilities of similar length share a forward pass, and generations share one running
    batch.
    """

    def __init__(self, calls: Calls, recipes: Recipes, max_length: int, max_batch: int) -> None:
        super().__init__(calls, recipes, max_length)
        self._max_batch = max_batch
        self._vocabulary = calls.model.config.get_text_config().vocab_size
        self._running = RunningBatch(calls)

    def _go_on(self, until_s: float) -> None:
        if self._scores:
            self._score_some()
        while self._generations and len(self._running) < self._max_batch:
            self._join()
        while len(self._running) and time.monotonic() < until_s:
            try:
                with phase("decode"):
                    over = self._running.step()
            except _OF_THE_REQUEST as error:
                self._fail(self._running.give_up(), error)
                return
            for id_, answer in over:
                self._end(id_, answer)
            if over and self._generations:
                return

    def _score_some(self) -> None:
        inputs = list(self._scores)
        places = plan_scores(
            [len(packed) // 4 for packed in inputs], self._max_batch, self._vocabulary
        )[0]
        chosen: Sequence[tuple[bytes, dict[int, Request]]] = [
            (inputs[place], self._scores.pop(inputs[place])) for place in places
        ]
        ids = [id_ for _, requests in chosen for id_ in requests]
        self._begin(ids)
        scored = [
            (packed, [request.continuation for request in requests.values()])
            for packed, requests in chosen
        ]
        try:
            with phase("prefill"):
                answers = score_batch(self._calls.model, scored)
        except _OF_THE_REQUEST as error:
            if len(chosen) > 1:  # one of them fails: try each alone
                self._one_by_one(chosen)
            else:
                self._fail(ids, error)
            return
        for id_, answer in zip(ids, answers, strict=True):
            self._end(id_, answer)

    def _one_by_one(self, chosen: Sequence[tuple[bytes, dict[int, Request]]]) -> None:
        for packed, requests in chosen:
            try:
                answers = score(
                    self._calls, packed, [request.continuation for request in requests.values()]
                )
            except _OF_THE_REQUEST as error:
                self._fail(requests, error)
                continue
            for id_, answer in zip(requests, answers, strict=True):
                self._end(id_, answer)

    def _join(self) -> None:
        if (begun := self._begin_generation()) is None:
            return
        id_, generation = begun
        try:
            answer = self._running.join(id_, generation)
        except _OF_THE_REQUEST as error:
            self._fail([id_], error)
            return
        if answer is not None:
            self._end(id_, answer)
