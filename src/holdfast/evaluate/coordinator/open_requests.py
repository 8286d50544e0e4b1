"""Keep open samples and requests; a request that several samples share is sent once.

An answered request is only in the journal. The bodies of open requests are in one file per model,
so that a million long prompts need no memory, and the space is freed when the model ends.

`ResumedRequests` are the requests from before a restart of the coordinator that engines hold or
have answered.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.evaluate.types.requests import KEY_BYTES, Keyed
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.messages import KeyedSample


@dataclass(slots=True)
class OpenRequest:
    """A request without an answer; `is_planned` is True once the policy has received it."""

    number: int
    model: int
    key: bytes
    affinity: int
    prompt_tokens: int
    max_new_tokens: int
    body_at: int
    body_bytes: int
    samples: list["OpenSample"]
    refusals: int = 0
    is_planned: bool = False


@dataclass(slots=True)
class OpenSample:
    """A sample that is not delivered yet.

    `missing` counts its requests without an answer. `unmeasured` is True if the sample's metric
    must still be computed.
    """

    number: int
    model: int
    task: int
    place: int
    keys: tuple[bytes, ...]
    metric_key: bytes
    missing: int
    unmeasured: bool
    measured: bytes = b""
    error: str = ""
    missing_requests: list[OpenRequest] = field(default_factory=list)


class _Bodies:
    """Keep a model's encoded requests in an unlinked temporary file."""

    def __init__(self, folder: Path) -> None:
        self._file, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        self._end = 0

    def append(self, body: bytes) -> int:
        """Append an encoded request; return its offset."""
        at, self._end = self._end, self._end + os.pwrite(self._file, body, self._end)
        return at

    def read(self, at: int, size_bytes: int) -> bytes:
        """Read an encoded request of `size_bytes` at the offset `at`."""
        return os.pread(self._file, size_bytes, at)

    def close(self) -> None:
        """Close the file, which frees its space."""
        os.close(self._file)


class OpenRequests:
    """Keep all open samples and requests; their numbers count from 0 and are never reused.

    Args:
        folder: the folder for the files with the requests' bodies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bodies: dict[int, _Bodies] = {}
        self._requests: dict[int, OpenRequest] = {}
        self._by_key: dict[tuple[int, bytes], OpenRequest] = {}
        self._samples: dict[int, OpenSample] = {}
        self._by_place: dict[tuple[int, int, int, tuple[bytes, ...]], OpenSample] = {}
        self._next_request = 0
        self._next_sample = 0

    def close(self) -> None:
        """Close the files."""
        for bodies in self._bodies.values():
            bodies.close()

    def add(self, model: int, task: int, given: KeyedSample, answers: Journal) -> OpenSample | None:
        """Add a sample, and open its requests that have no answer yet.

        The sample's `missing_requests` lists the opened requests.

        Returns:
            The new sample; None if an equal sample is open.
        """
        keys = tuple(request.key for request in given.requests)
        place = (model, task, given.sample, keys)
        if place in self._by_place:
            return None
        sample = OpenSample(
            number=self._next_sample,
            model=model,
            task=task,
            place=given.sample,
            keys=keys,
            metric_key=given.metric_key,
            missing=0,
            unmeasured=bool(given.metric_key),
        )
        self._next_sample += 1
        for keyed in given.requests:
            if keyed.key in answers:
                continue
            request = self._by_key.get((model, keyed.key))
            if request is None:
                request = self._open(model, keyed)
            if sample not in request.samples[-1:]:  # an equal request in one sample counts once
                request.samples.append(sample)
                sample.missing_requests.append(request)
                sample.missing += 1
        self._samples[sample.number] = sample
        self._by_place[place] = sample
        return sample

    def _open(self, model: int, keyed: Keyed) -> OpenRequest:
        bodies = self._bodies.get(model)
        if bodies is None:
            bodies = self._bodies[model] = _Bodies(self._folder)
        request = OpenRequest(
            number=self._next_request,
            model=model,
            key=keyed.key,
            affinity=keyed.affinity,
            prompt_tokens=keyed.prompt_tokens,
            max_new_tokens=keyed.max_new_tokens,
            body_at=bodies.append(keyed.body),
            body_bytes=len(keyed.body),
            samples=[],
        )
        self._next_request += 1
        self._requests[request.number] = request
        self._by_key[model, keyed.key] = request
        return request

    def request(self, number: int) -> OpenRequest | None:
        """Return the open request with this number; None if it is not open."""
        return self._requests.get(number)

    def request_of(self, model: int, key: bytes) -> OpenRequest | None:
        """Return the open request with this key; None if it is not open."""
        return self._by_key.get((model, key))

    def sample(self, number: int) -> OpenSample | None:
        """Return the open sample with this number; None if it is not open."""
        return self._samples.get(number)

    def body(self, request: OpenRequest) -> bytes:
        """Return the encoded request, to be sent to an engine."""
        return self._bodies[request.model].read(request.body_at, request.body_bytes)

    def answered(self, request: OpenRequest, error: str = "") -> list[OpenSample]:
        """Close a request whose answer is in the journal, or that failed for good with `error`.

        Returns:
            The samples that now have all their answers.
        """
        self._close(request)
        complete = []
        for sample in request.samples:
            sample.missing -= 1
            sample.error = sample.error or error
            if sample.missing == 0:
                complete.append(sample)
        return complete

    def _close(self, request: OpenRequest) -> None:
        del self._requests[request.number]
        del self._by_key[request.model, request.key]

    def delivered(self, sample: OpenSample) -> None:
        """Close a sample that is delivered."""
        del self._samples[sample.number]
        del self._by_place[sample.model, sample.task, sample.place, sample.keys]

    def drop(self, model: int, task: int | None = None) -> None:
        """Drop the samples of a model or one task, and the requests that no other sample needs."""
        dropped = [
            one for one in self._samples.values() if one.model == model and task in (None, one.task)
        ]
        for sample in dropped:
            self.delivered(sample)
            for key in set(sample.keys):
                if request := self._by_key.get((model, key)):
                    request.samples = [other for other in request.samples if other is not sample]
                    if not request.samples:
                        self._close(request)
        if task is None and (bodies := self._bodies.pop(model, None)):
            bodies.close()

    def open_samples(self, model: int, task: int) -> Iterator[OpenSample]:
        """List the samples of a task that are not delivered yet."""
        return (
            one for one in list(self._samples.values()) if one.model == model and one.task == task
        )

    def is_open(self, model: int) -> bool:
        """Return True if a model has open samples."""
        return any(one.model == model for one in self._samples.values())


def measured_key(metric_key: bytes, bodies: Sequence[bytes]) -> bytes:
    """Return the journal key of a metric: BLAKE2b of the metric's own key and the answers."""
    digest = hashlib.blake2b(metric_key, digest_size=KEY_BYTES)
    for body in bodies:
        digest.update(len(body).to_bytes(4, "little") + body)
    return digest.digest()


# The mark of an answer that came before the policy had its request, until the answer's commit.
_COMMIT = "the commit"


class ResumedRequests:
    """Track the requests that engines hold from before a restart of the coordinator.

    A sample with such a request waits here instead of being given to the policy. Requests are
    identified by model and key.
    """

    def __init__(self, open_requests: OpenRequests) -> None:
        self._open_requests = open_requests
        self._expected: dict[tuple[int, bytes], str] = {}
        self._samples: list[OpenSample] = []

    def held_by(self, model: int, key: bytes, engine: str) -> None:
        """Record that an engine holds a request from before the restart."""
        self._expected[model, key] = engine

    def came_early(self, model: int, key: bytes) -> None:
        """Record that an answer came before the policy had its request; it will be committed."""
        self._expected[model, key] = _COMMIT

    def came(self, model: int, key: bytes) -> None:
        """Record that the answer to a request has come, or will never come."""
        self._expected.pop((model, key), None)

    def committed(self, model: int, key: bytes) -> None:
        """Record that the answer to a request is now in the journal."""
        if self._expected.get((model, key)) == _COMMIT:
            del self._expected[model, key]

    def engine_lost(self, engine: str) -> None:
        """Stop waiting for the requests of a lost engine."""
        for place in [place for place, name in self._expected.items() if name == engine]:
            del self._expected[place]

    def keep(self, sample: OpenSample) -> bool:
        """Return True, and keep the sample, if one of its answers is expected from an engine."""
        if not self._waits(sample):
            return False
        self._samples.append(sample)
        return True

    def settled(self) -> list[OpenSample]:
        """Remove and return the open samples for which no more answers are expected."""
        if not self._samples:
            return []
        ready = [sample for sample in self._samples if not self._waits(sample)]
        self._samples = [sample for sample in self._samples if self._waits(sample)]
        found = []
        for sample in ready:
            if self._open_requests.sample(sample.number) is not sample:
                continue
            sample.missing_requests = [
                request
                for request in sample.missing_requests
                if self._open_requests.request(request.number) is request
            ]
            if sample.missing_requests or sample.unmeasured:
                found.append(sample)
        return found

    def _waits(self, sample: OpenSample) -> bool:
        return bool(self._expected) and any(
            (sample.model, request.key) in self._expected for request in sample.missing_requests
        )
