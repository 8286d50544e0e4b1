"""Choose the next token as transformers' `generate` does, and stop as lm-eval does."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.evaluate.engines.hf.calls import is_plain
from holdfast.evaluate.types.requests import Sampling

_LOOKBACK = 2
"""The number of tokens before a stop string that are searched too.

The number is from lm_eval.models.utils_hf.MultiTokenEOSCriteria (0.4.13).
"""
_REMEMBERED = 100_000


class StopStrings:
    """Detect stop strings in the newest tokens, as lm-eval's criterion at batch size 1 does.

    A stop string of n tokens stops the generation if the text of the last n + 2 generated tokens
    contains it. Texts of token windows are cached, since many generations have the same windows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, ...], str] = {}
        self._lengths: dict[str, int] = {}

    def watch(self, until: Iterable[str]) -> Callable[[Sequence[int]], bool]:
        """Return a function that returns True if, after all given tokens, generation must stop."""
        by_window: dict[int, list[str]] = {}
        for string in until:
            by_window.setdefault(self._length(string) + _LOOKBACK, []).append(string)
        windows = list(by_window.items())

        def is_stop(tokens: Sequence[int]) -> bool:
            for window, strings in windows:
                text = self._text(tuple(tokens[-window:]))
                for string in strings:
                    if string in text:
                        return True
            return False

        return is_stop

    def eos(self) -> str | None:
        """Return the end-of-sequence text; None if there is none.

        lm-eval adds this text to every list of stop strings.
        """
        token = self._tokenizer.eos_token_id
        return (
            None if token is None else str(self._tokenizer.decode(token, skip_special_tokens=False))
        )

    def _length(self, string: str) -> int:
        if string not in self._lengths:
            self._lengths[string] = len(self._tokenizer.encode(string, add_special_tokens=False))
        return self._lengths[string]

    def _text(self, tokens: tuple[int, ...]) -> str:
        text = self._texts.get(tokens)
        if text is None:
            if len(self._texts) >= _REMEMBERED:
                self._texts.clear()
            text = self._texts[tokens] = self._tokenizer.batch_decode([list(tokens)])[0]
        return text


# Processors whose result depends only on tokens and scores, so that one instance serves all
# requests.
_STATELESS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define how `generate` behaves for one set of parameters.

    Attributes:
        is_plain: True if tokens can be chosen one by one with a dynamic cache; otherwise `generate`
            itself must run.
        samples: True if tokens are sampled; False if the most likely token is taken.
        processors: the functions that transform the scores; None if there are none.
        eos: the tokens that end a generation.
        kwargs: the arguments of `generate`.
    """

    is_plain: bool
    samples: bool
    processors: Any
    eos: frozenset[int]
    kwargs: dict[str, Any]

    def criteria(self, is_stop: Callable[[Sequence[int]], bool], before: int) -> Any:
        """Convert a stop function into a stopping criterion of `generate`, for one sequence.

        `before` is the number of prompt tokens, which the stop function does not get.
        """
        from transformers import StoppingCriteria, StoppingCriteriaList

        class Spelled(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                stops = [is_stop(tokens) for tokens in input_ids[:, before:].tolist()]
                return torch.tensor(stops, device=input_ids.device)

        return StoppingCriteriaList([Spelled()])


class Recipes:
    """Create and cache the recipes for one model and tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._strings = StopStrings(tokenizer)
        self._eos_text = self._strings.eos()
        self._known: dict[tuple[Any, ...], Recipe] = {}
        self._is_plain = is_plain(model)

    def stops(self, until: tuple[str, ...]) -> Callable[[Sequence[int]], bool]:
        """See `StopStrings.watch`; the end-of-sequence text is added, as in lm-eval."""
        if self._eos_text is not None and self._eos_text not in until:
            until = (*until, self._eos_text)
        return self._strings.watch(until)

    def of(self, sampling: Sampling) -> Recipe:
        """Return the `Recipe` that draws tokens according to a request's sampling parameters.

        Equal parameters share one recipe.

        Raises:
            ValueError: transformers refuses the parameters.
        """
        key = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            tuple(sorted(sampling.extra.items())),
        )
        if key not in self._known:
            self._known[key] = self._work_out(sampling)
        return self._known[key]

    def _work_out(self, sampling: Sampling) -> Recipe:
        kwargs: dict[str, Any] = dict(sampling.extra)
        kwargs.setdefault("do_sample", sampling.temperature > 0)
        if kwargs["do_sample"]:
            kwargs["temperature"] = sampling.temperature
            # Leave out values that equal the defaults of `Sampling`: they were not requested, and
            # the model's own settings apply.
            kwargs |= {"top_p": sampling.top_p} if sampling.top_p != 1.0 else {}
            kwargs |= {"top_k": sampling.top_k} if sampling.top_k else {}
        kwargs["pad_token_id"] = _pad_token(self._tokenizer)
        model = self._model
        config, unused = model._prepare_generation_config(None, **kwargs)
        device = model.device
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=1,
            encoder_input_ids=torch.ones((1, 1), dtype=torch.long, device=device),
            prefix_allowed_tokens_fn=None,
            logits_processor=[],
            device=device,
            model_kwargs={},
        )
        from transformers.generation.configuration_utils import GenerationMode

        eos = config._eos_token_tensor
        steps_by_token = (
            self._is_plain
            and not unused
            and config.get_generation_mode()
            in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and {type(one).__name__ for one in processors} <= _STATELESS
            and config.num_return_sequences in (None, 1)
            and config.cache_implementation in (None, "dynamic")
            and not any(
                getattr(config, name, None)
                for name in (
                    "stop_strings",
                    "max_time",
                    "prefill_chunk_size",
                    "token_healing",
                    "max_new_tokens",
                )
            )
        )
        return Recipe(
            is_plain=steps_by_token,
            samples=bool(config.do_sample),
            processors=processors if len(processors) else None,
            eos=frozenset() if eos is None else frozenset(eos.flatten().tolist()),
            kwargs=kwargs,
        )


def _pad_token(tokenizer: Any) -> int:
    """Return the pad token that lm-eval chooses.

    This is the tokenizer's pad token; without one, the unknown token; without that, the
    end-of-sequence token.
    """
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
