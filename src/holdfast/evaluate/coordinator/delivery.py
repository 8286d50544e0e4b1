"""Send finished samples to the clients that submitted them."""

from collections.abc import Iterator

import msgspec

from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.open_requests import OpenRequests, OpenSample
from holdfast.evaluate.types.harness import AnsweredSample
from holdfast.evaluate.types.requests import decode_answer
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

_MESSAGE_BYTES = 8 * 1024 * 1024  # a target for the answers in one message; a sample is never cut


class Delivery:
    """Keep the connected clients, and send them their samples.

    Args:
        open_requests: closes delivered samples.
        models: the models, with the journals of answers.
    """

    def __init__(self, open_requests: OpenRequests, models: Models) -> None:
        self._open_requests, self._models = open_requests, models
        self._clients: dict[tuple[int, int], Connection] = {}  # keyed by model and task
        self._outbox: dict[
            tuple[int, int], list[tuple[int, AnsweredSample]]
        ] = {}  # each with its approximate size in bytes
        self.count = 0
        """The number of samples delivered so far."""

    def client_joined(self, peer: Connection) -> None:
        """Deliver a task's samples to this client instead of its predecessor."""
        self._clients[peer.hello.model, peer.hello.task] = peer

    def client_gone(self, peer: Connection) -> None:
        """Forget a client, unless a successor has its task."""
        place = peer.hello.model, peer.hello.task
        if self._clients.get(place) is peer:
            del self._clients[place]

    def refuse(self, model: int, why: str) -> None:
        """Refuse all clients of a model."""
        for (number, _task), client in list(self._clients.items()):
            if number == model:
                client.send(messages.Refused(why=why))

    def stop_clients(self) -> None:
        """Stop all clients."""
        for client in self._clients.values():
            client.send(messages.Stop())

    def bodies(self, sample: OpenSample) -> list[bytes]:
        """Return a sample's stored answers, encoded, in the order of its requests."""
        model = self._models.get(sample.model)
        assert model is not None
        assert model.answers is not None
        bodies = [model.answers.get(key) for key in sample.keys]
        return [body for body in bodies if body is not None]

    def add(self, sample: OpenSample) -> None:
        """Queue a sample that is finished or failed; `send` delivers it."""
        bodies = [] if sample.error else self.bodies(sample)
        try:
            answers = [decode_answer(body) for body in bodies]
        except msgspec.DecodeError as error:  # an older Holdfast did not check the engine's answer
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
        """Send the queued samples."""
        outbox, self._outbox = self._outbox, {}
        for place, samples in outbox.items():
            # A disconnected client submits again after its return, and all answers are in the
            # journals.
            if peer := self._clients.get(place):
                for part in _cut(samples):
                    peer.send(messages.Answers(samples=part))


def _cut(samples: list[tuple[int, AnsweredSample]]) -> Iterator[list[AnsweredSample]]:
    """Cut samples into parts of one message each."""
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
