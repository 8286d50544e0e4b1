"""Samples that miss nothing any more, on their way to the clients that asked for them."""

from collections.abc import Iterator

import msgspec

from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.open_requests import OpenRequests, OpenSample
from holdfast.evaluate.types.harness import AnsweredSample
from holdfast.evaluate.types.requests import decode_answer
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

_MESSAGE_BYTES = 8 * 1024 * 1024  # of answers, about; a sample is never cut


class Delivery:
    """Keeps the connected clients, and sends them their samples.

    Args:
        open_requests: closes a sample that is delivered.
        models: with the journals of their answers.
    """

    def __init__(self, open_requests: OpenRequests, models: Models) -> None:
        self._open_requests, self._models = open_requests, models
        self._clients: dict[tuple[int, int], Connection] = {}  # by model and task
        self._outbox: dict[
            tuple[int, int], list[tuple[int, AnsweredSample]]
        ] = {}  # with about its bytes
        self.count = 0
        """Samples delivered so far."""

    def client_joined(self, peer: Connection) -> None:
        """Deliver the samples of a task to this client, in place of the one before."""
        self._clients[peer.hello.model, peer.hello.task] = peer

    def client_gone(self, peer: Connection) -> None:
        """Forget a client, unless another has its task by now."""
        place = peer.hello.model, peer.hello.task
        if self._clients.get(place) is peer:
            del self._clients[place]

    def refuse(self, model: int, why: str) -> None:
        """Refuse the clients of a model whatever they want."""
        for (number, _task), client in list(self._clients.items()):
            if number == model:
                client.send(messages.Refused(why=why))

    def stop_clients(self) -> None:
        """Have all clients end."""
        for client in self._clients.values():
            client.send(messages.Stop())

    def bodies(self, sample: OpenSample) -> list[bytes]:
        """A sample's encoded answers, in the order of its requests; those that there are."""
        model = self._models.get(sample.model)
        assert model is not None
        assert model.answers is not None
        bodies = [model.answers.get(key) for key in sample.keys]
        return [body for body in bodies if body is not None]

    def add(self, sample: OpenSample) -> None:
        """A sample is done, or has an error for good: it goes out with the next `send`."""
        bodies = [] if sample.error else self.bodies(sample)
        try:
            answers = [decode_answer(body) for body in bodies]
        except msgspec.DecodeError as error:  # of an engine that an older Holdfast did not check
            bodies, answers = [], []
            model = self._models.get(sample.model)
            folder = model.answers.folder if model and model.answers else "the journal"
            sample.error = (
                f"A stored answer cannot be read ({error}). Remove {folder} to ask for them again."
            )
        self._open_requests.delivered(sample)
        self.count += 1
        answered = AnsweredSample(
            sample=sample.place, answers=answers, measured=sample.measured, error=sample.error
        )
        size_bytes = sum(map(len, bodies)) + len(sample.measured)
        self._outbox.setdefault((sample.model, sample.task), []).append((size_bytes, answered))

    def send(self) -> None:
        """Send what was added."""
        outbox, self._outbox = self._outbox, {}
        for place, samples in outbox.items():
            # One that is gone asks again when it is back, and finds everything in the journals.
            if peer := self._clients.get(place):
                for part in _cut(samples):
                    peer.send(messages.Answers(samples=part))


def _cut(samples: list[tuple[int, AnsweredSample]]) -> Iterator[list[AnsweredSample]]:
    """Into parts that a message holds."""
    part: list[AnsweredSample] = []
    part_bytes = 0
    for size_bytes, sample in samples:
        if part and part_bytes + size_bytes > _MESSAGE_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(sample)
        part_bytes += size_bytes
    if part:
        yield part
