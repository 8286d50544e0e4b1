"""Provide inspect's model class for engines that take text messages."""

import itertools
import json
from collections import Counter
from typing import ClassVar

from inspect_ai._util.constants import DEFAULT_MAX_TOKENS
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.model._model_output import StopReason
from inspect_ai.solver._task_state import sample_state
from inspect_ai.tool import ToolChoice, ToolInfo
from msgspec.structs import replace

from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import EngineClient, SampleRequests
from holdfast.evaluate.types.requests import Answer, Request, Sampling, Scalar

STOP_REASONS: dict[str, StopReason] = {"": "unknown", "stop": "stop", "length": "max_tokens"}
_PENALTIES = ("frequency_penalty", "presence_penalty")


class RequestBuilder:
    """Build and send a request for each choice; the base of both model classes.

    If a sample repeats a request, or sends the request again in another epoch, sampling makes a new
    draw, and greedy decoding uses the same request. Repeats are counted within a sample, so that
    the count does not depend on the order in which samples run.
    """

    client: ClassVar[EngineClient]

    def __init__(self) -> None:
        self._numbers = itertools.count()  # numbers for the client, unique among open samples
        self._draws: Counter[tuple[object, ...]] = Counter()

    async def ask(self, request: Request, config: GenerateConfig) -> list[Answer]:
        """Request as many answers as the configuration has choices."""
        choices = config.num_choices or 1
        requests, sampling = [request], request.sampling
        assert sampling is not None
        if sampling.temperature > 0:
            state = sample_state()
            of = (state.sample_id, state.epoch) if state else (0, 1)
            draw = (*of, request.prompt, request.text)
            first, self._draws[draw] = self._draws[draw], self._draws[draw] + choices
            repeats = [(of[1] - 1) << 20 | first + choice for choice in range(choices)]
            requests = [
                replace(request, sampling=replace(sampling, repeat=repeat)) for repeat in repeats
            ]
        answered = await self.client.ask_one(
            SampleRequests(sample=next(self._numbers), requests=requests)
        )
        if answered.error:
            raise EvaluationError(answered.error)
        return answered.answers if len(requests) == choices else answered.answers * choices


def sampling_of(
    config: GenerateConfig, max_new_tokens: int, extra: dict[str, Scalar] | None = None
) -> Sampling:
    """Convert inspect's configuration for generation.

    Decoding is greedy by default, so that scores are repeatable.

    Raises:
        EvaluationError: the configuration needs a feature that engines lack.
    """
    if config.logprobs or config.top_logprobs or config.prompt_logprobs:
        raise EvaluationError(
            "The task asks for log-probabilities of generated tokens, which engines do not give."
        )
    common = Sampling(
        max_new_tokens=max_new_tokens, until=tuple(config.stop_seqs or ()), extra=extra or {}
    )
    if not config.temperature:
        return common
    return Sampling(
        max_new_tokens=common.max_new_tokens,
        until=common.until,
        extra=common.extra,
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        seed=config.seed or 0,
    )


def usage_of(answers: list[Answer], prompt_tokens: int) -> ModelUsage:
    """Count the tokens of a prompt, which was read once, and of its answers."""
    new_tokens = sum(answer.new_tokens for answer in answers)
    return ModelUsage(
        input_tokens=prompt_tokens,
        output_tokens=new_tokens,
        total_tokens=prompt_tokens + new_tokens,
    )


class TextModel(RequestBuilder, ModelAPI):
    """Send chat messages to engines as they are; the engine applies the chat template."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  inspect's own signature; it is not changed
    ) -> None:
        ModelAPI.__init__(self, model_name, base_url, api_key, [], config)
        RequestBuilder.__init__(self)

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002  inspect's name
        tools: list[ToolInfo],
        tool_choice: ToolChoice,  # noqa: ARG002  without tools there is no choice
        config: GenerateConfig,
    ) -> ModelOutput:
        """See `ModelAPI.generate`.

        Raises:
            EvaluationError: the task uses tools, or messages with content other than text.
        """
        if tools:
            raise EvaluationError(
                "The task gives the model tools, which OpenAI-compatible engines do not "
                "support. "
                "Use an engine that takes tokens."
            )
        messages = [{"role": message.role, "content": _text(message)} for message in input]
        extra: dict[str, Scalar] = {
            name: value for name in _PENALTIES if (value := getattr(config, name)) is not None
        }
        sampling = sampling_of(config, config.max_tokens or self.max_tokens(), extra)
        text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
        answers = await self.ask(Request(kind="chat", text=text, sampling=sampling), config)
        choices = [
            ChatCompletionChoice(
                message=ChatMessageAssistant(
                    content=_until(answer.text, sampling.until),
                    model=self.model_name,
                    source="generate",
                ),
                stop_reason=STOP_REASONS[answer.finish],
            )
            for answer in answers
        ]
        return ModelOutput(
            model=self.model_name,
            choices=choices,
            usage=usage_of(answers, answers[0].prompt_tokens),
        )

    async def count_text_tokens(self, text: str) -> int:
        """Estimate the number of tokens; inspect's own count would need a file from the network."""
        return max(1, len(text) // 4)

    def max_tokens(self) -> int:
        """Return the largest number of tokens to generate if the task sets no limit.

        The number is inspect's default, but at most half of the engine's maximum length.
        """
        return min(DEFAULT_MAX_TOKENS, self.client.facts.max_length // 2 or DEFAULT_MAX_TOKENS)


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, list) and any(
        part.type not in {"text", "reasoning"} for part in message.content
    ):
        raise EvaluationError(
            "The task shows the model images, audio or documents; engines accept only text."
        )
    return message.text


def _until(text: str, stops: tuple[str, ...]) -> str:
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
