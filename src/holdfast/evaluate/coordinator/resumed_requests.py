"""Answers that come although nobody was asked: after a restart engines go on with what the life before gave them.

A sample of which an engine already holds a request, or whose answer came before its question, is kept from the policy
until that is settled: what is under way is not asked of another.
"""

from holdfast.evaluate.coordinator.open_requests import OpenRequests, OpenSample

_COMMIT = "the commit"  # by which an answer is expected that came before its question


class ResumedRequests:
    """See the module. Places are (model, key of a request)."""

    def __init__(self, book: OpenRequests) -> None:
        self._book = book
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
            if self._book.sample(sample.number) is not sample:
                continue
            sample.missing_requests = [
                request
                for request in sample.missing_requests
                if self._book.request(request.number) is request
            ]
            if sample.missing_requests or sample.unmeasured:
                found.append(sample)
        return found

    def _waits(self, sample: OpenSample) -> bool:
        return bool(self._expected) and any(
            (sample.model, request.key) in self._expected for request in sample.missing_requests
        )
