"""Provide inspect's model class for engines that take tokens.

The class is inspect's own Hugging Face provider (`inspect_ai.model._providers.hf` of inspect-ai
0.3.285) without its model. The provider makes the prompt's tokens and parses the answer's tokens,
so that a task behaves as with `--model hf/NAME -M do_sample=false`.
"""

import functools
import hashlib
from datetime import datetime, tzinfo

from inspect_ai._util.constants import DEFAULT_MAX_TOKENS
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.model._chat_message import ChatMessageAssistant
from inspect_ai.model._providers.hf import HuggingFaceAPI
from inspect_ai.model._providers.util import HFHandler
from inspect_ai.tool import ToolChoice, ToolInfo

from holdfast.evaluate.harness.inspect.text_model import (
    STOP_REASONS,
    RequestBuilder,
    sampling_of,
    usage_of,
)
from holdfast.evaluate.types.requests import Answer, Request, pack_tokens, unpack_tokens


class TokenModel(RequestBuilder, HuggingFaceAPI):
    """Apply the chat template and the tokenizer in this process, and send tokens to engines.

    Attributes:
        began: the time that chat templates get as the present, so that a resumed evaluation builds
            the same prompts on a later day.
    """

    began: datetime

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  inspect's own signature; it is not changed
    ) -> None:
        from transformers import AutoTokenizer

        # Do not call HuggingFaceAPI's constructor, which would load the model; set the attributes
        # that its methods need.
        ModelAPI.__init__(self, model_name, base_url, api_key, [], config)
        RequestBuilder.__init__(self)
        self.tokenizer = AutoTokenizer.from_pretrained(self.client.facts.tokenizer)
        _stop_the_clock_of_templates(self.began)
        self.chat_template = self.use_chat_template = self.enable_thinking = None

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002  inspect's name
        tools: list[ToolInfo],
        tool_choice: ToolChoice,  # noqa: ARG002  no provider of local models has a use for it
        config: GenerateConfig,
    ) -> ModelOutput:
        """See `ModelAPI.generate`; prompt and generation are limited to the model's length."""
        prompt = self.tokenizer(self.hf_chat(input, tools))["input_ids"]
        room = self.client.facts.max_length - len(prompt)
        if room < 1:
            return self._too_long(len(prompt))
        sampling = sampling_of(config, min(config.max_tokens or DEFAULT_MAX_TOKENS, room))
        request = Request(kind="generate", prompt=pack_tokens(prompt), sampling=sampling)
        answers = await self.ask(request, config)
        choices = [
            ChatCompletionChoice(
                message=self._message(self._text(answer, sampling.until), tools, request),
                stop_reason=STOP_REASONS[answer.finish],
            )
            for answer in answers
        ]
        return ModelOutput(
            model=self.model_name, choices=choices, usage=usage_of(answers, len(prompt))
        )

    async def count_text_tokens(self, text: str) -> int:
        """Count tokens by the model's tokenizer, since inspect's estimate needs the network."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """Do nothing, since there is no model to free."""

    def _text(self, answer: Answer, stops: tuple[str, ...]) -> str:
        """Decode an answer up to the token that completes the first stop string.

        The provider keeps the stop string in the text.
        """
        decode = functools.partial(
            self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        tokens = list(unpack_tokens(answer.tokens))
        text = str(decode(tokens))
        if not any(stop in text for stop in stops):
            return text
        # The first `long` tokens contain a stop, the first `short` tokens do not.
        short, long = 0, len(tokens)
        while long - short > 1:
            middle = (short + long) // 2
            if any(stop in decode(tokens[:middle]) for stop in stops):
                long = middle
            else:
                short = middle
        return str(decode(tokens[:long]))

    def _message(self, text: str, tools: list[ToolInfo], request: Request) -> ChatMessageAssistant:
        if not tools:
            return ChatMessageAssistant(content=text, model=self.model_name, source="generate")
        message = HFHandler(self.model_name, self.model_family()).parse_assistant_response(
            text, tools
        )
        for number, call in enumerate(message.tool_calls or []):
            # Replace inspect's random id: some templates show it, so that the next prompt would
            # differ in each run.
            drawn = hashlib.sha256(request.prompt + text.encode() + bytes([number])).hexdigest()
            call.id = f"{call.function}_{drawn[:22]}"
        return message

    def _too_long(self, prompt_tokens: int) -> ModelOutput:
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(
                    message=ChatMessageAssistant(
                        content="", model=self.model_name, source="generate"
                    ),
                    stop_reason="model_length",
                )
            ],
            usage=ModelUsage(
                input_tokens=prompt_tokens, output_tokens=0, total_tokens=prompt_tokens
            ),
        )


def _stop_the_clock_of_templates(began: datetime) -> None:
    """Make `began` the present for all chat templates of this process, which runs one task."""
    from transformers.utils import chat_template_utils

    class Began(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return began.astimezone(tz) if tz else began

    chat_template_utils.datetime = Began  # type: ignore[attr-defined]
