"""Samples and requests in hand: who waits for what. A request that several samples share is asked once.

What was answered stands in the journal alone; here is only what is not. The requests' bodies lie in a file a model, so
that a million long prompts need no memory, and nothing remains of a model that ended.

`ResumedRequests` are the requests that engines still hold, or have answered, from before a restart of the coordinator.
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
    """A request that has no answer yet; `is_planned` once the policy knows of it."""

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

    `missing` counts its requests without an answer; `unmeasured` says that its metric is wanted and not there.
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
    """A model's requests as engines get them, in a file without a name."""

    def __init__(self, folder: Path) -> None:
        self._file, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        self._end = 0

    def append(self, body: bytes) -> int:
        """Keep a body; returns where."""
        at, self._end = self._end, self._end + os.pwrite(self._file, body, self._end)
        return at

    def read(self, at: int, size_bytes: int) -> bytes:
        """What was kept."""
        return os.pread(self._file, size_bytes, at)

    def close(self) -> None:
        """Give the room back."""
        os.close(self._file)


class OpenRequests:
    """All that is open. Numbers of requests and samples count from 0 and are never given twice.

    Args:
        folder: where the bodies lie.
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
        """Let go of the files."""
        for bodies in self._bodies.values():
            bodies.close()

    def add(self, model: int, task: int, given: KeyedSample, answers: Journal) -> OpenSample | None:
        """Enter a sample; its `missing_requests` are those without an answer. None if it is open already."""
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
            if (
                sample not in request.samples[-1:]
            ):  # the same question twice in one sample counts once
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
        """An open request by its number."""
        return self._requests.get(number)

    def request_of(self, model: int, key: bytes) -> OpenRequest | None:
        """An open request by its content."""
        return self._by_key.get((model, key))

    def sample(self, number: int) -> OpenSample | None:
        """An open sample by its number."""
        return self._samples.get(number)

    def body(self, request: OpenRequest) -> bytes:
        """The request as an engine is to get it."""
        return self._bodies[request.model].read(request.body_at, request.body_bytes)

    def answered(self, request: OpenRequest, error: str = "") -> list[OpenSample]:
        """Close a request, for which the journal now has an answer or nobody will have one (`error`).

        Returns the samples that miss no answer any more.
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
        """Close a sample."""
        del self._samples[sample.number]
        del self._by_place[sample.model, sample.task, sample.place, sample.keys]

    def drop(self, model: int, task: int | None = None) -> None:
        """Forget the samples of a model, or of one of its tasks, and the requests that only they wait for."""
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
        """The samples of a task that are not delivered."""
        return (
            one for one in list(self._samples.values()) if one.model == model and one.task == task
        )

    def is_open(self, model: int) -> bool:
        """Whether anything of a model is open."""
        return any(one.model == model for one in self._samples.values())


def measured_key(metric_key: bytes, bodies: Sequence[bytes]) -> bytes:
    """Under which key a metric is journalled: what it is, of which answers (BLAKE2b)."""
    digest = hashlib.blake2b(metric_key, digest_size=KEY_BYTES)
    for body in bodies:
        digest.update(len(body).to_bytes(4, "little") + body)
    return digest.digest()


_COMMIT = "the commit"  # by which an answer is expected that came before its question


class ResumedRequests:
    """See the module. Places are (model, key of a request)."""

    def __init__(self, open_requests: OpenRequests) -> None:
        self._open_requests = open_requests
        self._expected: dict[tuple[int, bytes], str] = {}
        self._samples: list[OpenSample] = []

    def held_by(self, model: int, key: bytes, engine: str) -> None:
        """An engine holds what we did not ask it."""
        self._expected[model, key] = engine

    def came_early(self, model: int, key: bytes) -> None:
        """An answer came whose question the policy does not have; it is about to be committed."""
        self._expected[model, key] = _COMMIT

    def came(self, model: int, key: bytes) -> None:
        """An answer came, or will not."""
        self._expected.pop((model, key), None)

    def committed(self, model: int, key: bytes) -> None:
        """An answer is in the journal."""
        if self._expected.get((model, key)) == _COMMIT:
            del self._expected[model, key]

    def engine_lost(self, engine: str) -> None:
        """What it held nobody has."""
        for place in [place for place, name in self._expected.items() if name == engine]:
            del self._expected[place]

    def keep(self, sample: OpenSample) -> bool:
        """Keep a sample from the policy if an engine is about to answer some of it; whether it was kept."""
        if not self._waits(sample):
            return False
        self._samples.append(sample)
        return True

    def settled(self) -> list[OpenSample]:
        """The samples of which no engine holds anything any more, and that still want something."""
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
