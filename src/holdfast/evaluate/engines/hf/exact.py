"""Answer one request at a time, with the bits of lm-eval's `--model hf` at batch size 1.

The model is called as `HFLM._loglikelihood_tokens` and `GenerationMixin.generate` (transformers 5)
call it, without the code around those calls: with the same inputs, the same class of cache, and the
same order of products.

There is one intended difference. Two continuations of different lengths may share an input, if a
text is cut in two places. If both are in one call, lm-eval 0.4.13 takes the scores of the shorter
one from the first rows of the longer one. Here, each continuation gets the answer that lm-eval
gives to it in a call of its own, since an answer must not depend on other requests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.phases import note_phase
from holdfast.evaluate.engines.hf.calls import Calls
from holdfast.evaluate.engines.hf.sampling import Recipe, Recipes
from holdfast.evaluate.types.requests import Answer, Request, keyed, pack_tokens


def input_of(request: Request, max_length: int) -> bytes:
    """Return the packed input of a log-probability request.

    The input is prompt and continuation without the last token, cut from the left to at most
    `max_length` tokens.
    """
    return (request.prompt + request.continuation)[-4 * (max_length + 1) :][:-4]


def fault_of(request: Request, max_length: int) -> str:
    """Return the reason why a request cannot be answered; empty if it can.

    The checks are the assertions of lm-eval.
    """
    if request.kind == "chat" or not request.prompt:
        return "This engine takes token ids; the request has text, or an empty prompt."
    if request.kind == "loglikelihood":
        if not request.continuation:
            return "The continuation is empty: it has no log-probability."
        if len(request.continuation) > 4 * max_length:
            return f"A continuation of {len(request.continuation) // 4} tokens does not fit {max_length} tokens."
    elif not 0 < request.max_new_tokens() < max_length:
        wanted = request.max_new_tokens()
        return f"{wanted} new tokens cannot be generated: it must be between 1 and {max_length - 1}, the model's limit."
    return ""


def tensor_of(packed: bytes, device: torch.device) -> torch.Tensor:
    """Convert packed token ids to a tensor of int64 with the shape [1, tokens]."""
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).to(
        device=device, dtype=torch.long
    )[None]


@torch.inference_mode()
def score(calls: Calls, packed_input: bytes, continuations: Sequence[bytes]) -> list[Answer]:
    """Return the answers for continuations that share an input, by one forward pass."""
    device = calls.model.device
    logits = calls.scores(tensor_of(packed_input, device))[0]
    # Compute only the rows that the longest continuation needs.
    longest = max(map(len, continuations)) // 4
    rows = torch.log_softmax(logits[logits.shape[0] - longest :], dim=-1)
    read = logits.shape[0]
    return [
        answer_of(rows, tensor_of(continuation, device)[0], read) for continuation in continuations
    ]


def answer_of(rows: torch.Tensor, continuation: torch.Tensor, read: int) -> Answer:
    """Create the answer for a continuation from log-probabilities [rows, vocabulary].

    The last rows belong to the continuation. `read` is the number of tokens in the input.
    """
    rows = rows[-continuation.shape[0] :]
    logprobs = rows.gather(1, continuation[:, None]).squeeze(-1)
    return Answer(
        logprob=float(logprobs.sum()),
        is_greedy=bool((rows.argmax(dim=-1) == continuation).all()),
        prompt_tokens=read + 1,
    )


@dataclass(slots=True, kw_only=True)
class Generation:
    """A generation in progress: call `begin`, then `advance` until it returns an answer.

    Attributes:
        calls: the model.
        recipe: how the next token is chosen.
        is_stop: the stop criterion, a function of all generated tokens.
        most: the largest number of tokens to generate.
        prompt: the prompt, as int64 of shape [1, tokens].
        tokens: the tokens generated so far.
        newest: the newest token, as int64 of shape [1, 1].
        cache: the cache of all tokens before `newest`; None before the prompt is read.
        random: the generator of random numbers; None without sampling.
    """

    calls: Calls
    recipe: Recipe
    is_stop: Callable[[Sequence[int]], bool]
    most: int
    prompt: torch.Tensor
    random: torch.Generator | None
    tokens: list[int]
    newest: torch.Tensor
    cache: Any = None

    @classmethod
    def begin(
        cls, calls: Calls, recipes: Recipes, request: Request, max_length: int
    ) -> "Generation":
        """Prepare a generation.

        As in lm-eval, the prompt is cut from the left to leave room for the new tokens.

        Raises:
            ValueError: transformers refuses the parameters.
        """
        sampling = request.sampling
        assert sampling is not None
        recipe = recipes.of(sampling)
        device = calls.model.device
        prompt = tensor_of(request.prompt[-4 * (max_length - sampling.max_new_tokens) :], device)
        return cls(
            calls=calls,
            recipe=recipe,
            is_stop=recipes.stops(sampling.until),
            most=sampling.max_new_tokens,
            prompt=prompt,
            random=torch.Generator(device).manual_seed(seed_of(request))
            if recipe.samples
            else None,
            tokens=[],
            newest=prompt,
        )

    def position(self) -> int:
        """Return the position of the newest token."""
        return self.prompt.shape[1] + len(self.tokens) - 1

    @torch.inference_mode()
    def advance(self, until_s: float) -> Answer | None:
        """Generate tokens until the generation ends or the time is over; at least one token.

        `until_s` is a time of `time.monotonic()`.

        Returns:
            The answer if the generation has ended; otherwise None.
        """
        if not self.recipe.is_plain:
            return self._generate_whole()
        while True:
            phase, began_ns = "prefill" if self.cache is None else "decode", time.monotonic_ns()
            if self.cache is None:
                logits, self.cache = self.calls.read(self.prompt)
            else:
                logits, self.cache = self.calls.read_on(self.newest, self.position(), self.cache)
            scores = logits[:, -1].to(torch.float32, copy=True)
            answer = self.take(scores, scores.argmax(dim=-1, keepdim=True))
            note_phase(phase, began_ns)
            if answer is not None or time.monotonic() >= until_s:
                return answer

    def take(self, scores: torch.Tensor, likeliest: torch.Tensor) -> Answer | None:
        """Choose the next token from the scores [1, vocabulary].

        Returns:
            The answer if this token ends the generation; otherwise None.
        """
        chosen = likeliest
        if self.recipe.processors is not None:
            before = torch.tensor([self.tokens], dtype=torch.long, device=self.prompt.device)
            scores = self.recipe.processors(torch.cat([self.prompt, before], dim=-1), scores)
            chosen = scores.argmax(dim=-1, keepdim=True)
        if self.random is not None:
            chosen = torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self.random)
        self.newest = chosen
        token = int(chosen)
        self.tokens.append(token)
        if token in self.recipe.eos or self.is_stop(self.tokens):
            return self._answer(stopped=True)
        return self._answer(stopped=False) if len(self.tokens) >= self.most else None

    def _generate_whole(self) -> Answer:
        """Generate by transformers' `generate`, for features that `take` lacks, such as beams."""
        before = self.prompt.shape[1]
        began_ns = time.monotonic_ns()
        with torch.random.fork_rng(enabled=self.random is not None):
            if self.random is not None:
                torch.manual_seed(self.random.initial_seed())
            output = self.calls.model.generate(
                input_ids=self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_length=before + self.most,
                stopping_criteria=self.recipe.criteria(self.is_stop, before),
                use_cache=True,
                **self.recipe.kwargs,
            )
        self.tokens = output[0, before:].tolist()
        note_phase("decode", began_ns)
        return self._answer(stopped=self.tokens[-1] in self.recipe.eos or self.is_stop(self.tokens))

    def _answer(self, *, stopped: bool) -> Answer:
        return Answer(
            tokens=pack_tokens(self.tokens),
            finish="stop" if stopped else "length",
            prompt_tokens=self.prompt.shape[1],
            new_tokens=len(self.tokens),
        )


def seed_of(request: Request) -> int:
    """Return the seed with which a request is sampled.

    The seed is a hash of the request's content, including `seed` and `repeat`.
    """
    return int.from_bytes(keyed(request).key[:7], "little")
