"""Provide a client with an engine in the same process, without a coordinator or a journal.

It is meant for a few samples, and for tests.
"""

import itertools
from collections.abc import Sequence

from holdfast.evaluate.testing import (
    Answer,
    AnsweredSample,
    Engine,
    EvaluationError,
    Harness,
    ModelFacts,
    Request,
    SampleRequests,
    TaskEntry,
    keyed,
)


class LocalClient:
    """An `EngineClient` that sends each distinct request only once.

    Args:
        engine: an engine that has loaded its model.
        facts: the facts about that model.
        harness: computes the metrics of samples in this process; requires `entry`.
        entry: the suite entry of the task.
    """

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        harness: Harness | None = None,
        entry: TaskEntry | None = None,
    ) -> None:
        self.facts = facts
        self._engine, self._harness, self._entry = engine, harness, entry
        self._answers: dict[bytes, Answer] = {}

    def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        """See `EngineClient.ask`."""
        requests: dict[bytes, Request] = {}
        for sample in samples:
            requests |= {keyed(request).key: request for request in sample.requests}
        self._answer(
            {key: request for key, request in requests.items() if key not in self._answers}
        )
        return [self._answered(sample) for sample in samples]

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """See `EngineClient.ask_one`."""
        return self.ask([sample])[0]

    def _answer(self, requests: dict[bytes, Request]) -> None:
        keys = dict(zip(itertools.count(), requests))
        self._engine.submit([(number, requests[key]) for number, key in keys.items()])
        while keys:
            for finished in self._engine.step():
                key = keys.pop(finished.id)
                if finished.answer is None:
                    raise EvaluationError(finished.error)
                self._answers[key] = finished.answer

    def _answered(self, sample: SampleRequests) -> AnsweredSample:
        answers = [self._answers[keyed(request).key] for request in sample.requests]
        measured = b""
        if sample.metric_key and self._harness and self._entry:
            measured = self._harness.measure(self._entry, sample.sample, answers, self.facts)
        return AnsweredSample(sample=sample.sample, answers=answers, measured=measured)
