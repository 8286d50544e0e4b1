"""Define requests to engines and their answers; each request has its content as key.

The key identifies the request alone. The journal adds the digest of the weights and the engine's
numerics, so that an answer of one checkpoint never serves another.
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
    """Define how to generate; `extra` holds a harness's further options by transformers' names.

    Attributes:
        max_new_tokens: the most tokens to generate.
        until: strings that end the generation; the engine may stop at the first and need not
            cut the string off.
        temperature: 0 is greedy.
        repeat: the number of this generation among several of one prompt; together with `seed`
            the seed of sampling.
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
    """One request to an engine, the smallest unit of scheduling.

    Attributes:
        kind: "loglikelihood" for the log-probability of `continuation` after `prompt`;
            "generate" for tokens after `prompt`; "chat" for a reply to `text`, messages of an
            OpenAI-compatible API as JSON.
        prompt: token ids, int32, little endian (`pack_tokens`); empty if the engine tokenizes
            `text`.
        continuation: token ids as in `prompt`; "loglikelihood" only.
        text: the prompt as a string, or the messages; empty if token ids are given.
        continuation_text: the continuation as a string, if `text` is given.
        sampling: "generate" and "chat" only.
    """

    kind: Kind
    prompt: bytes = b""
    continuation: bytes = b""
    text: str = ""
    continuation_text: str = ""
    sampling: Sampling | None = None

    def prompt_tokens(self) -> int:
        """Count the tokens that an engine must read; for text, one token for four characters."""
        if self.prompt:
            return (len(self.prompt) + len(self.continuation)) // 4
        return max(1, (len(self.text) + len(self.continuation_text)) // 4)

    def max_new_tokens(self) -> int:
        """Return the most tokens to generate; 0 for a log-probability."""
        return self.sampling.max_new_tokens if self.sampling else 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine's answer to a request.

    Attributes:
        logprob: the natural logarithm for a "loglikelihood", summed over the continuation.
        is_greedy: True if each token of the continuation is the likeliest one.
        tokens: the generated tokens, packed as a prompt; empty if the engine gives text alone.
        text: the generated text, if the engine decodes its tokens itself.
        finish: the reason for the end of a generation.
        prompt_tokens, new_tokens: the tokens read and generated, for the accounting.
    """

    logprob: float | None = None
    is_greedy: bool = False
    tokens: bytes = b""
    text: str = ""
    finish: Literal["", "stop", "length"] = ""
    prompt_tokens: int = 0
    new_tokens: int = 0


class Keyed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An encoded request with the fields that the scheduler needs.

    Attributes:
        key: the key of the request.
        affinity: equal for requests with the same input tokens; equal in the upper 32 bits for
            requests with a long common prefix.
        body: the encoded `Request`.
    """

    key: bytes
    affinity: int
    prompt_tokens: int
    max_new_tokens: int
    body: bytes


def keyed(request: Request) -> Keyed:
    """Encode a request with its key (BLAKE2b of the encoding, whose field order is fixed)."""
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
    """Encode an answer for the journal."""
    return _encoder.encode(answer)


def decode_answer(body: bytes) -> Answer:
    """Decode an answer of `encode_answer`.

    Raises:
        msgspec.DecodeError: the bytes are not an answer.
    """
    return _answers.decode(body)


def decode_request(body: bytes) -> Request:
    """Decode the body of a `keyed` request.

    Raises:
        msgspec.DecodeError: the bytes are not a request.
    """
    return _requests.decode(body)


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


_PREFIX_BYTES = (
    4 * 64
)  # few-shot examples and instructions are longer than this prefix, questions often shorter
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack token ids as int32, little endian."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """Unpack the token ids of `pack_tokens` into an array of int32."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens
