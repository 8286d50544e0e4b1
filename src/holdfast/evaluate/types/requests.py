"""What an engine is asked, and what it answers; each request keyed by its content.

The key names the question alone. The journal adds who was asked (the digest of the weights and the engine's numerics),
so that an answer of one checkpoint can never stand for another's.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

KEY_BYTES = 16

Kind = Literal["loglikelihood", "generate", "chat"]
Scalar = str | int | float | bool | None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to generate. What a harness passes beyond these fields stands in `extra`, under transformers' names.

    Attributes:
        max_new_tokens: the most tokens to generate.
        until: strings that end the generation; the engine may stop at the first and need not cut it off.
        temperature: 0 is greedy.
        repeat: which of several generations of one prompt this is; with `seed` it seeds what is sampled.
    """

    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repeat: int = 0
    extra: dict[str, Scalar] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question to an engine: the smallest thing that is scheduled.

    Attributes:
        kind: "loglikelihood" asks for the log-probability of `continuation` after `prompt`; "generate" for tokens
            after `prompt`; "chat" for a reply to `text`, messages of an OpenAI-compatible API as JSON.
        prompt: token ids, int32, little endian (`pack_tokens`); empty where the engine makes its own tokens of `text`.
        continuation: token ids as `prompt`; "loglikelihood" only.
        text: the prompt as a string, or the messages; empty where token ids are given.
        continuation_text: the continuation as a string, where `text` is given.
        sampling: "generate" and "chat" only.
    """

    kind: Kind
    prompt: bytes = b""
    continuation: bytes = b""
    text: str = ""
    continuation_text: str = ""
    sampling: Sampling | None = None

    def prompt_tokens(self) -> int:
        """The tokens an engine must read; for text an estimate of four characters a token."""
        if self.prompt:
            return (len(self.prompt) + len(self.continuation)) // 4
        return max(1, (len(self.text) + len(self.continuation_text)) // 4)

    def max_new_tokens(self) -> int:
        """The most tokens an engine may generate for it; 0 for a log-probability."""
        return self.sampling.max_new_tokens if self.sampling else 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine says to a request.

    Attributes:
        logprob: natural logarithm, of a "loglikelihood" (summed over the continuation).
        is_greedy: whether each token of the continuation is the likeliest one.
        tokens: the tokens generated, packed as a prompt; empty where the engine gives text alone.
        text: the text generated, where the engine makes its own text.
        finish: why a generation ended.
        prompt_tokens, new_tokens: what was read and generated, for the accounting.
    """

    logprob: float | None = None
    is_greedy: bool = False
    tokens: bytes = b""
    text: str = ""
    finish: Literal["", "stop", "length"] = ""
    prompt_tokens: int = 0
    new_tokens: int = 0


class Keyed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request on its way: what those between client and engine must know, and the rest unread.

    Attributes:
        key: of the request.
        affinity: equal for requests with the same input tokens, or (its upper 32 bits) with a long prefix in common.
        body: the `Request`, encoded.
    """

    key: bytes
    affinity: int
    prompt_tokens: int
    max_new_tokens: int
    body: bytes


def keyed(request: Request) -> Keyed:
    """Encode a request and name it by its content (BLAKE2b of the encoding, whose order of fields is fixed)."""
    body = _encoder.encode(request)
    inputs = request.prompt + request.continuation[:-4] or request.text.encode()
    prefix = _hash32(inputs[:_PREFIX_BYTES])
    return Keyed(
        key=hashlib.blake2b(body, digest_size=KEY_BYTES).digest(),
        affinity=prefix << 32 | _hash32(inputs),
        prompt_tokens=request.prompt_tokens(),
        max_new_tokens=request.max_new_tokens(),
        body=body,
    )


def encode_answer(answer: Answer) -> bytes:
    """An answer as it is kept in the journal."""
    return _encoder.encode(answer)


def decode_answer(body: bytes) -> Answer:
    """The answer of `encode_answer`.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _answers.decode(body)


def decode_request(body: bytes) -> Request:
    """The request of `keyed`.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _requests.decode(body)


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


_PREFIX_BYTES = (
    4 * 64
)  # of a shared prompt: few-shot examples and instructions are longer, questions often shorter
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32, little endian."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """The token ids of `pack_tokens`, as an array of int32."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens
