"""Compute embedding vectors with an OpenAI-compatible endpoint (`/v1/embeddings`), if configured.

The environment variables are `HOLDFAST_EMBEDDINGS_URL` (up to and including the version, such as
`https://host/v1`), `HOLDFAST_EMBEDDINGS_MODEL` and, if the server requires a key,
`HOLDFAST_EMBEDDINGS_KEY`. Only root lines are sent, without secrets and without varying parts
(paths, numbers, quoted names, hosts). Redirects are not followed, and the size and the time of an
answer are limited.
"""

import array
import json
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.diagnose.agents.openai_api import Api
from holdfast.diagnose.agents.redact import redact
from holdfast.diagnose.memory.words import mask

_TEXT_CHARACTERS: Final = 1000
_BATCH: Final = 64
_DIMENSIONS_LIMIT: Final = 16_384
_ANSWER_LIMIT_BYTES: Final = 32 << 20


class EmbeddingsFailed(HoldfastError):
    """The endpoint returned no valid vectors; the caller can compare words instead."""


@dataclass(frozen=True, kw_only=True)
class Embedder(Api):
    """A model that converts lines to embedding vectors."""

    ENV: ClassVar[str] = "HOLDFAST_EMBEDDINGS"
    PATH: ClassVar[str] = "/embeddings"

    timeout_s: float = 20.0
    """The limit in seconds for one request, to the last byte of the answer."""
    clock: Clock = field(default_factory=SystemClock, repr=False)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector per text, in the order of `texts`, with Euclidean length 1.

        Raises:
            EmbeddingsFailed: there was no answer, or the answer had no valid vectors; the message
                names the next step.
        """
        try:
            import httpx
        except ImportError as error:
            raise EmbeddingsFailed(
                "Embeddings need httpx, which is not installed. Run: pip install httpx"
            ) from error
        found: list[list[float]] = []
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with httpx.Client(
                headers={"Accept-Encoding": "identity", **headers},
                follow_redirects=False,
                timeout=self.timeout_s,
                trust_env=not self.is_this_host,
            ) as client:
                for at in range(0, len(texts), _BATCH):
                    found += self._batch(
                        client, [self._cleared(text) for text in texts[at : at + _BATCH]]
                    )
        except httpx.HTTPError as error:
            raise self._failed(f"did not answer ({type(error).__name__})") from error
        return found

    def _batch(self, client: Any, texts: Sequence[str]) -> list[list[float]]:
        latest_s = self.clock.monotonic_s() + self.timeout_s
        body = bytearray()
        with client.stream(
            "POST", self.request_url, json={"model": self.model, "input": list(texts)}
        ) as answer:
            if answer.status_code != 200:
                raise self._failed(f"answered with status {answer.status_code}")
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > _ANSWER_LIMIT_BYTES or self.clock.monotonic_s() > latest_s:
                    raise self._failed("sent too much data, or sent the data too slowly")
        try:
            given = json.loads(body)["data"]
            ordered = sorted(given, key=lambda one: one["index"])
            vectors = [[float(value) for value in one["embedding"]] for one in ordered]
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise self._failed("sent no vectors") from error
        lengths = {len(vector) for vector in vectors}
        if (
            len(vectors) != len(texts)
            or len(lengths) != 1
            or not 0 < lengths.pop() <= _DIMENSIONS_LIMIT
        ):
            raise self._failed("sent vectors of the wrong number or size")
        return [self._unit(vector) for vector in vectors]

    def _cleared(self, text: str) -> str:
        return mask(redact(text[:_TEXT_CHARACTERS], self.known_secrets)) or "-"

    def _unit(self, vector: list[float]) -> list[float]:
        length = math.sqrt(sum(value * value for value in vector))
        if not math.isfinite(length) or length == 0:
            raise self._failed("sent a vector without a direction")
        return [value / length for value in vector]

    def _failed(self, what: str) -> EmbeddingsFailed:
        return EmbeddingsFailed(
            f"The embeddings endpoint at {self.host} {what}. Past incidents are compared by words; "
            f"mend {self.env_url()}, {self.env_model()} and {self.env_key()}, or unset {self.env_url()}."
        )


def packed(vector: Sequence[float]) -> bytes:
    """Encode a vector as bytes: float32, little-endian."""
    made = array.array("f", vector)
    if sys.byteorder != "little":
        made.byteswap()
    return made.tobytes()


def unpacked(data: bytes) -> list[float]:
    """Decode a vector that `packed` encoded."""
    made = array.array("f")
    made.frombytes(data[: len(data) // 4 * 4])
    if sys.byteorder != "little":
        made.byteswap()
    return made.tolist()


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors of length 1; 0 if their dimensions differ."""
    return sum(map(operator.mul, one, other)) if len(one) == len(other) else 0.0
