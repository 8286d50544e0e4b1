"""Run lm-eval's own Hugging Face model class with recorded requests and replayed answers.

`HFLM` tokenizes, truncates, decodes, cuts at stop strings and sums log-probabilities, all
unmodified. Only its two methods that use the model are replaced: `_loglikelihood_tokens` and
`_model_generate`. Each instance runs by itself, as with lm-eval's reference setting `batch_size=1`,
so that the requests and the response of an instance depend only on this instance.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.harness import ModelFacts
from holdfast.evaluate.types.requests import Answer, Request, Sampling, pack_tokens, unpack_tokens

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from holdfast.evaluate.harness.lm_eval.metrics import Exchange


class EngineLM(HFLM):  # type: ignore[misc]
    """Run `HFLM` on a folder with config and tokenizer, while the weights are in engines.

    Args:
        facts: the facts of the model.
        model_args: the values of lm-eval's `--model_args` (see `options`).
        seed: the seed of sampling.
    """

    exchange: "Exchange"

    def __init__(self, facts: ModelFacts, model_args: dict[str, Any], seed: int) -> None:
        self._facts, self._seed = facts, seed
        self._recorded: list[Request] = []
        self._replayed: Answer | None = None
        self._is_generating = False
        # Cache the last contexts: lm-eval encodes the context of a document once for each of its
        # choices, one after another.
        self._encode = lru_cache(maxsize=4)(super().tok_encode)
        super().__init__(
            pretrained=facts.tokenizer,
            device="cpu",
            batch_size=1,
            max_length=facts.max_length or None,
            **model_args,
        )

    def _create_model(self, *_: Any, **__: Any) -> None:
        self._model = SimpleNamespace(config=self.config, to=lambda _device: None)

    def get_model_info(self) -> dict[str, Any]:
        """Return the fields about the model in lm-eval's results.

        The number of parameters is unknown here, since the weights are in engines.
        """
        return {
            "model": self._facts.name,
            "model_num_parameters": -1,
            "model_dtype": str(getattr(self.config, "dtype", None) or ""),
            "model_revision": self.revision,
            "model_sha": self._facts.digest,
        }

    # The methods that the evaluator calls: `exchange` has the responses.

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return log-probabilities; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return log-probabilities of whole texts; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        """Return generated texts; the signature is lm-eval's."""
        return self.exchange.responses(requests)

    # The harness's own code. It runs twice for an instance: to record its requests, and to replay
    # the answers.

    def requests_of(self, instance: "Instance") -> list[Request]:
        """Return the requests that `HFLM` makes for an instance, in order."""
        self._recorded, self._replayed = [], None
        self._run(instance)
        return self._recorded

    def response(self, instance: "Instance", answers: Sequence[Answer]) -> Any:
        """Return the response that `HFLM` makes from the answers.

        The response does not depend on the instance's prompt.
        """
        match instance.request_type:
            case "loglikelihood":
                # `TemplateLM.loglikelihood` returns the result of `_loglikelihood_tokens`.
                return answers[0].logprob, answers[0].is_greedy
            case "loglikelihood_rolling":  # as `HFLM.loglikelihood_rolling` sums its windows
                return sum(answer.logprob for answer in answers)
            case _:
                (self._replayed,) = answers
                return self._run(instance)[0]

    def _run(self, instance: "Instance") -> Any:
        self._is_generating = instance.request_type == "generate_until"
        try:
            return getattr(HFLM, instance.request_type)(self, [instance], disable_tqdm=True)
        finally:
            self._is_generating = False

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: Any,
    ) -> list[int]:
        """Return a text's token ids; the signature is lm-eval's."""
        if self._is_generating:
            return []  # used only to sort a batch, and this batch has one prompt
        return self._encode(string, add_special_tokens, left_truncate_len)  # type: ignore[no-any-return]

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> Any:
        """Return the token ids of prompts; the signature is lm-eval's."""
        if self._replayed is not None:
            return _NO_PROMPT, _NO_PROMPT  # lm-eval cuts the prompt off the reply afterwards
        return super().tok_batch_encode(strings, *args, **kwargs)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        for _strings, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length or not context:
                raise BadUse(
                    f"A continuation of {len(continuation)} tokens after {len(context)} cannot be "
                    "scored by a model "
                    f"of {self.max_length} tokens. Leave the task out, or serve a longer model."
                )
            # Build the same input as `HFLM`, plus the last token, which `HFLM` leaves out.
            tokens = (context + continuation)[-(self.max_length + 1) :]
            self._recorded.append(
                Request(
                    kind="loglikelihood",
                    prompt=pack_tokens(tokens[: -len(continuation)]),
                    continuation=pack_tokens(continuation),
                )
            )
        return [(0.0, False)] * len(requests)

    def _model_generate(
        self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Any:
        if self._replayed is not None:
            tokens = torch.tensor([list(unpack_tokens(self._replayed.tokens))], dtype=context.dtype)
            return torch.cat([context, tokens], dim=1)
        generation_kwargs.pop("attention_mask", None)  # all ones for a single prompt
        self._recorded.append(
            Request(
                kind="generate",
                prompt=pack_tokens(context[0].tolist()),
                sampling=sampling(
                    generation_kwargs, max_length - context.shape[1], stop, self._seed
                ),
            )
        )
        return context


_NO_PROMPT = torch.zeros((1, 1), dtype=torch.long)


def sampling(
    kwargs: dict[str, Any], max_new_tokens: int, stop: Sequence[str], seed: int
) -> Sampling:
    """Convert the arguments that lm-eval passes to transformers' `generate`.

    As in `HFLM._model_generate`, a temperature of 0 without `do_sample` means greedy decoding.
    `top_p` and `top_k` do not affect greedy decoding and are left out, so that equal requests are
    sent once. Values that the caller gives and that equal the defaults of `Sampling` go to `extra`,
    since the model's own generation config may have other defaults.

    Raises:
        BadUse: no engine can use a value, or transformers refuses the arguments.
    """
    rest = dict(kwargs)
    temperature = float(rest.pop("temperature", 0.0))
    do_sample = rest.pop("do_sample", None)
    if do_sample is None:
        do_sample = temperature > 0
    if max_new_tokens < 1:
        raise BadUse(
            f"{max_new_tokens} tokens are to be generated. Raise max_gen_toks, or leave max_length "
            "out."
        )
    if do_sample and temperature <= 0:
        raise BadUse(
            f"Sampling with temperature {temperature} is not possible. Set gen_kwargs temperature "
            "above 0."
        )
    top_p, top_k = rest.pop("top_p", None), rest.pop("top_k", None)
    if do_sample:
        rest |= {"top_p": top_p} if top_p == 1 else {}
        rest |= {"top_k": top_k} if top_k == 0 else {}
    for name, value in rest.items():
        if not isinstance(value, str | int | float | bool | None):
            raise BadUse(
                f"The generation argument {name} is {value!r}. Only texts, numbers, true and false "
                "can be sent."
            )
    return Sampling(
        max_new_tokens=max_new_tokens,
        until=tuple(stop),
        temperature=temperature if do_sample else 0.0,
        top_p=float(top_p) if do_sample and top_p is not None else 1.0,
        top_k=int(top_k) if do_sample and top_k is not None else 0,
        seed=seed if do_sample else 0,
        extra=rest,
    )
