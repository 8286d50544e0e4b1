"""Samples that miss nothing any more, on their way to the clients that asked for them."""

from collections.abc import Callable

from holdfast.evaluate.coordinator import wire
from holdfast.evaluate.coordinator.book import Book, OpenSample
from holdfast.evaluate.coordinator.connections import Peer
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.harness.harness import AnsweredSample
from holdfast.evaluate.requests import decode_answer


class Delivery:
    """See the module. `client` finds who runs (model, task) now, or None."""

    def __init__(self, book: Book, models: Models, client: Callable[[tuple[int, int]], Peer | None]) -> None:
        self._book, self._models, self._client = book, models, client
        self._outbox: dict[tuple[int, int], list[AnsweredSample]] = {}
        self.count = 0
        """Samples delivered so far."""

    def bodies(self, sample: OpenSample) -> list[bytes]:
        """A sample's encoded answers, in the order of its requests; those that there are."""
        model = self._models.get(sample.model)
        assert model is not None
        assert model.answers is not None
        bodies = [model.answers.get(key) for key in sample.keys]
        return [body for body in bodies if body is not None]

    def add(self, sample: OpenSample) -> None:
        """A sample is done, or has an error for good: it goes out with the next `send`."""
        answers = [] if sample.error else [decode_answer(body) for body in self.bodies(sample)]
        self._book.delivered(sample)
        self.count += 1
        self._outbox.setdefault((sample.model, sample.task), []).append(
            AnsweredSample(sample=sample.place, answers=answers, measured=sample.measured, error=sample.error)
        )

    def send(self) -> None:
        """Send what was added."""
        outbox, self._outbox = self._outbox, {}
        for place, samples in outbox.items():
            # One that is gone asks again when it is back, and finds everything in the journals.
            if peer := self._client(place):
                peer.send(wire.Answers(samples=samples))
