"""Send finished samples to the clients that submitted them."""

from collections.abc import Iterator

import msgspec

from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.open_requests import OpenRequests, OpenSample
from holdfast.evaluate.types.harness import AnsweredSample
from holdfast.evaluate.types.requests import decode_answer
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

_MESSAGE_BYTES = 8 * 1024 * 1024  # the target size of a message's answers; no sample is split


class Delivery:
    """Keep track of the connected clients, and send the finished samples to them.

    Args:
        open_requests: closes delivered samples.
        models: the models, with the journals of answers.
    """

    def __init__(self, open_requests: OpenRequests, models: Models) -> None:
        self._open_requests, self._models = open_requests, models
        self._clients: dict[tuple[int, int], Connection] = {}  # keyed by model and task
        # Samples to send, each with its approximate size in bytes.
        self._outbox: dict[tuple[int, int], list[tuple[int, AnsweredSample]]] = {}
        self.count = 0
        """The number of samples delivered so far."""

    def client_joined(self, peer: Connection) -> None:
        """Send a task's samples to this client from now on, instead of to an earlier client."""
        self._clients[peer.hello.model, peer.hello.task] = peer

    def client_left(self, peer: Connection) -> None:
        """Forget a client, unless a newer client has its task."""
        place = peer.hello.model, peer.hello.task
        if self._clients.get(place) is peer:
            del self._clients[place]

    def refuse(self, model: int, why: str) -> None:
        """Refuse all clients of a model; `why` is the reason."""
        for (number, _task), client in list(self._clients.items()):
            if number == model:
                client.send(messages.Refused(why=why))

    def stop_clients(self) -> None:
        """Send `Stop` to all clients."""
        for client in self._clients.values():
            client.send(messages.Stop())

    def bodies(self, sample: OpenSample) -> list[bytes]:
        """Return the encoded answers of a sample from the journal, in the order of its requests."""
        model = self._models.get(sample.model)
        assert model is not None
        assert model.answers is not None
        bodies = [model.answers.get(key) for key in sample.keys]
        return [body for body in bodies if body is not None]

    def add(self, sample: OpenSample) -> None:
        """Queue a sample that is complete or failed; `send` sends it."""
        bodies = [] if sample.error else self.bodies(sample)
        try:
            answers = [decode_answer(body) for body in bodies]
        except msgspec.DecodeError as error:  # an older Holdfast did not check the engine's answer
            bodies, answers = [], []
            model = self._models.get(sample.model)
            folder = model.answers.folder if model and model.answers else "the journal"
            sample.error = f"A stored answer cannot be read ({error}). Remove {folder} to request the answers again."
        self._open_requests.delivered(sample)
        self.count += 1
        answered = AnsweredSample(
            sample=sample.place, answers=answers, measured=sample.measured, error=sample.error
        )
        size_bytes = sum(map(len, bodies)) + len(sample.measured)
        self._outbox.setdefault((sample.model, sample.task), []).append((size_bytes, answered))

    def send(self) -> None:
        """Send the queued samples to their clients."""
        outbox, self._outbox = self._outbox, {}
        for place, samples in outbox.items():
            # Drop the samples of a client that is not connected: on its return, the client submits
            # them again, and all their answers are in the journals.
            if peer := self._clients.get(place):
                for part in _cut(samples):
                    peer.send(messages.Answers(samples=part))


def _cut(samples: list[tuple[int, AnsweredSample]]) -> Iterator[list[AnsweredSample]]:
    """Split samples into lists that fit into one message each."""
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
