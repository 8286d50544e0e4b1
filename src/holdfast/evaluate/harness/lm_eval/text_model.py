"""Provide lm-eval's model for engines that tokenize text themselves (OpenAI-compatible servers)."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from holdfast.core.errors import BadUse
from holdfast.evaluate.harness.lm_eval.model import sampling
from holdfast.evaluate.types.harness import ModelFacts
from holdfast.evaluate.types.requests import Answer, Request

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from holdfast.evaluate.harness.lm_eval.metrics import Exchange


class TextLM(TemplateLM):  # type: ignore[misc]
    """Behave as lm-eval's `local-completions`; with a template, as its `local-chat-completions`.

    Args:
        facts: the facts of the model.
        model_args: the values of lm-eval's `--model_args`; only `think_end_token` applies to text.
        seed: the seed of sampling.
    """

    exchange: "Exchange"
    max_gen_toks = 256
    eot_token_id = None
    tokenizer_name = ""

    def __init__(self, facts: ModelFacts, model_args: dict[str, Any], seed: int) -> None:
        super().__init__()
        self._facts, self._seed = facts, seed
        self._think_end_token = model_args.get("think_end_token")

    def get_model_info(self) -> dict[str, Any]:
        """Return the fields about the model in lm-eval's results."""
        return {"model": self._facts.name}

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,  # noqa: ARG002
    ) -> Any:
        """Return the messages as JSON, since the server applies the chat template."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def tok_encode(self, *_: Any, **__: Any) -> list[int]:
        """Raise an error, since only the server can tokenize."""
        raise AssertionError("tokens are the server's")

    def _loglikelihood_tokens(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("tokens are the server's")

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return log-probabilities; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return log-probabilities of whole texts; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return generated texts; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    def requests_of(self, instance: "Instance") -> list[Request]:
        """Return the requests for an instance.

        Raises:
            BadUse: a server that takes only text cannot answer such a request.
        """
        match instance.request_type:
            case "loglikelihood":
                context, continuation = instance.args
                if isinstance(context, JsonChatStr):
                    raise BadUse(
                        f"{instance.task_name} asks for log-probabilities, which a chat server "
                        "does not return. "
                        "Leave chat_template out, or the task."
                    )
                # Blanks belong to the continuation, as in `TemplateLM._encode_pair`.
                kept = context.rstrip()
                return [
                    Request(
                        kind="loglikelihood",
                        text=kept,
                        continuation_text=context[len(kept) :] + continuation,
                    )
                ]
            case "generate_until":
                kwargs, stop = self._kwargs(instance)
                chosen = sampling(kwargs, kwargs.pop("max_gen_toks"), stop, self._seed)
                context = instance.args[0]
                if isinstance(context, JsonChatStr):
                    return [Request(kind="chat", text=context.prompt, sampling=chosen)]
                return [Request(kind="generate", text=context, sampling=chosen)]
            case _:
                raise BadUse(
                    f"{instance.task_name} asks for a text's perplexity, which needs tokens. Name "
                    "the model's "
                    "tokenizer to the engine (tokenizer = FOLDER), or leave the task out."
                )

    def response(self, instance: "Instance", answers: Sequence[Answer]) -> Any:
        """Return the response that lm-eval makes from the answers to `requests_of(instance)`."""
        (answer,) = answers
        if instance.request_type == "loglikelihood":
            return answer.logprob, answer.is_greedy
        stop = self._kwargs(instance)[1]
        return postprocess_generated_text(
            answer.text, stop=stop, think_end_token=self._think_end_token
        )

    def _kwargs(self, instance: "Instance") -> tuple[dict[str, Any], list[str]]:
        kwargs = normalize_gen_kwargs(instance.args[1], self.max_gen_toks)
        return kwargs, handle_stop_sequences(kwargs.pop("until", None), eos=None)
