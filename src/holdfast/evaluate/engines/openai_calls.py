"""Convert requests and answers for an OpenAI-compatible API, by pure functions.

Log-probabilities are requested and read as in lm-eval's `local-completions`
(lm_eval.models.openai_completions 0.4.13). The server echoes the prompt with the log-probability of
each token, and generates one more token, which is ignored.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.evaluate.types.requests import Answer, Request, keyed, pack_tokens, unpack_tokens

_MAX_TOKENS = 100_000_000  # tokens of a prompt; a larger stated number is wrong
_CHAT_STOPS = 4  # lm-eval's limit, and OpenAI's own
# Options of transformers that have no meaning for a server.
_NOT_FOR_A_SERVER = {"do_sample", "use_cache", "num_beams"}

Tokenize = Callable[[str], Sequence[int]]


class MalformedReply(Exception):
    """A server's reply violates the API.

    The message completes a sentence that starts with `URL sends an unusable answer:`.
    """


class NotSupported(Exception):
    """The server lacks a feature that a request needs; the message is one sentence."""


def path_and_body(request: Request, model: str, max_length: int) -> tuple[str, dict[str, Any]]:
    """Return the path of a request below the API's URL, and the body of the request."""
    body: dict[str, Any] = {
        "model": model,
        "seed": int.from_bytes(keyed(request).key[:4], "little") >> 1,
    }
    if request.kind == "loglikelihood":
        prompt, _ = _echoed(request, max_length)
        return "completions", body | {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
        }
    sampling = request.sampling
    assert sampling is not None
    body |= {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    body |= {"top_p": sampling.top_p} if sampling.top_p != 1.0 else {}
    body |= {"top_k": sampling.top_k} if sampling.top_k else {}
    body |= {name: value for name, value in sampling.extra.items() if name not in _NOT_FOR_A_SERVER}
    stop = [string for string in sampling.until if string]
    if request.kind == "chat":
        body |= {"messages": json.loads(request.text)} | (
            {"stop": stop[:_CHAT_STOPS]} if stop else {}
        )
        return "chat/completions", body
    body |= {"stop": stop} if stop else {}
    if not request.prompt:
        return "completions", body | {"prompt": request.text}
    prompt_tokens = list(unpack_tokens(request.prompt))[-(max_length - sampling.max_new_tokens) :]
    # Request the token ids beside the text, by an option of vLLM that other servers ignore.
    return "completions", body | {"prompt": prompt_tokens, "return_token_ids": True}


def answer_of(request: Request, reply: Any, max_length: int, tokenize: Tokenize | None) -> Answer:
    """Convert a server's reply into an answer.

    Raises:
        MalformedReply: the reply has no usable content.
        NotSupported: the reply lacks a part that the request needs, such as log-probabilities.
    """
    try:
        choice = reply["choices"][0]
        if request.kind == "loglikelihood":
            return _scored(request, choice.get("logprobs"), max_length)
        content = choice["message"]["content"] if request.kind == "chat" else choice["text"]
        return _generated(request, choice, _text_of(content), reply.get("usage"), tokenize)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReply(
            f"{type(error).__name__}: {error} in {json.dumps(reply)[:300]}"
        ) from error


def _echoed(request: Request, max_length: int) -> tuple[list[int] | str, int]:
    """Return the text or tokens that the server echoes: the prompt with its continuation.

    The second value is the number of tokens before the continuation; -1 for text, whose tokens only
    the server counts.
    """
    if not request.prompt:
        return request.text + request.continuation_text, -1
    tokens = list(unpack_tokens(request.prompt + request.continuation))
    cut = max(0, len(tokens) - (max_length - 1))  # the limit includes one generated token
    return tokens[cut:], len(request.prompt) // 4 - cut


def _text_of(value: Any) -> str:
    """Return the text of a message's content: a string or a list of parts; "" for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(
            _text_of(one.get("text") if isinstance(one, Mapping) else one) for one in value
        )
    raise ValueError(f"its text is {type(value).__name__}, neither a string nor a list of parts")


def _scored(request: Request, logprobs: Mapping[str, Any] | None, max_length: int) -> Answer:
    given = logprobs or {}
    of_tokens, tops = given.get("token_logprobs"), given.get("top_logprobs")
    if not of_tokens or not tops or not any(tops):
        missing = "top_logprobs" if of_tokens else "logprobs" if not logprobs else "token_logprobs"
        raise NotSupported(
            f"The server returns no log-probabilities of a prompt ({missing} is null), and this task "
            "is scored by them. "
            "Name a server that gives them (vLLM's completions do), or tasks that generate."
        )
    _, before = _echoed(request, max_length)
    if before < 0:
        before = _first_token_of(request, given["text_offset"])
    values = of_tokens[before:-1]
    wanted = len(request.continuation) // 4
    if not values or (wanted and len(values) != wanted):
        raise ValueError(
            f"{len(values)} log-probabilities came for {wanted or 'the'} tokens; the prompt is not "
            "echoed"
        )
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"log-probabilities are not numbers: {values[:8]}")
    # Leave out the prompt's first token, which has no log-probability. The likeliest token of each
    # place is the one that the server reports.
    is_greedy = all(
        value >= max(top.values()) for value, top in zip(values, tops[before:-1], strict=True)
    )
    return Answer(logprob=float(sum(values)), is_greedy=is_greedy, prompt_tokens=len(of_tokens) - 1)


def _first_token_of(request: Request, offsets: Sequence[int]) -> int:
    """Return the index of the first token that contains a character of the continuation."""
    begin = len(request.text)
    places = [place for place, offset in enumerate(offsets[:-1]) if offset <= begin]
    return max(1, places[-1])


def _generated(
    request: Request,
    choice: dict[str, Any],
    text: str,
    usage: Any,
    tokenize: Tokenize | None,
) -> Answer:
    tokens: Sequence[int] = choice.get("token_ids") or ()
    counts = usage if isinstance(usage, Mapping) else {}
    assert request.sampling is not None
    if request.prompt and not tokens:
        if tokenize is None:
            raise ValueError(
                "the server returns no token ids; name the model's tokenizer (option tokenizer = "
                "FOLDER)"
            )
        tokens = tokenize(text)
    return Answer(
        tokens=pack_tokens(tokens) if request.prompt else b"",
        text=text,
        finish="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=_count(counts.get("prompt_tokens"), _MAX_TOKENS) or request.prompt_tokens(),
        new_tokens=_count(counts.get("completion_tokens"), request.sampling.max_new_tokens)
        or len(tokens)
        or max(1, len(text) // 4),
    )


def _count(value: Any, most: int) -> int:
    """Return the number of tokens that a server states; 0 if the number is not valid.

    The number is used only for predictions.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        return 0
    return round(value)
