"""Define requests to engines and their answers; a request's key is a hash of its content.

The key depends only on the request. The journal adds the digest of the weights and the engine's
numerics to the key, so that an answer of one checkpoint is never reused for another.
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
    """Define how to generate tokens.

    Attributes:
        max_new_tokens: the largest number of tokens to generate.
        until: strings that end the generation; the engine may stop at the first of them, and may
            leave it at the end of the text.
        temperature: the sampling temperature; 0 is greedy decoding.
        repeat: the index of this generation if one prompt has several; `seed` and `repeat` together
            seed the sampling.
        extra: further options of the harness, under the names of transformers.
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
    """A request to an engine: the smallest unit of scheduling.

    Attributes:
        kind: "loglikelihood" computes the log-probability of `continuation` after `prompt`;
            "generate" generates tokens after `prompt`; "chat" generates a reply to `text`, which
            holds the messages of an OpenAI-compatible API as JSON.
        prompt: token ids as int32, little endian (`pack_tokens`); empty if the engine tokenizes
            `text`.
        continuation: token ids in the form of `prompt`; for "loglikelihood" only.
        text: the prompt as a string, or the messages; empty if token ids are given.
        continuation_text: the continuation as a string, if `text` is given.
        sampling: how to generate; for "generate" and "chat" only.
    """

    kind: Kind
    prompt: bytes = b""
    continuation: bytes = b""
    text: str = ""
    continuation_text: str = ""
    sampling: Sampling | None = None

    def prompt_tokens(self) -> int:
        """Count the tokens that an engine must read; estimate four characters a token for text."""
        if self.prompt:
            return (len(self.prompt) + len(self.continuation)) // 4
        return max(1, (len(self.text) + len(self.continuation_text)) // 4)

    def max_new_tokens(self) -> int:
        """Return the largest number of tokens to generate; 0 for a log-probability."""
        return self.sampling.max_new_tokens if self.sampling else 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine's answer to a request.

    Attributes:
        logprob: for "loglikelihood", the natural logarithm of the probability, summed over the
            continuation's tokens.
        is_greedy: True if each token of the continuation is the most likely one.
        tokens: the generated tokens in the form of `Request.prompt`; empty if the engine returns
            only text.
        text: the generated text, if the engine decodes its tokens itself.
        finish: the reason why the generation ended.
        prompt_tokens, new_tokens: the numbers of tokens read and generated.
    """

    logprob: float | None = None
    is_greedy: bool = False
    tokens: bytes = b""
    text: str = ""
    finish: Literal["", "stop", "length"] = ""
    prompt_tokens: int = 0
    new_tokens: int = 0


class Keyed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Hold an encoded request, with the fields of it that the scheduler needs.

    Attributes:
        key: the key of the request.
        affinity: a number that shows shared work: requests with the same input tokens have the same
            number, and requests with a long common prefix have the same upper 32 bits.
        body: the encoded `Request`.
    """

    key: bytes
    affinity: int
    prompt_tokens: int
    max_new_tokens: int
    body: bytes


def keyed(request: Request) -> Keyed:
    """Encode a request and compute its key.

    The key is BLAKE2b of the encoding, in which the order of fields is fixed.
    """
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
    """Decode an answer that `encode_answer` encoded.

    Raises:
        msgspec.DecodeError: the bytes are not an answer.
    """
    return _answers.decode(body)


def decode_request(body: bytes) -> Request:
    """Decode the body of a request that `keyed` encoded.

    Raises:
        msgspec.DecodeError: the bytes are not a request.
    """
    return _requests.decode(body)


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


# Few-shot examples and instructions are longer than this prefix, questions often shorter.
_PREFIX_BYTES = 4 * 64
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack token ids as int32, little endian."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """Unpack token ids that `pack_tokens` packed into an array of int32."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens
