"""Call a model exactly as lm-eval and transformers' `generate` do, and replay small models.

transformers 5's `generate` leaves out the attention mask if nothing is padded, passes positions if
the model takes them, and requests only the last position's logits if the model can restrict them.
The cache is a `DynamicCache` of the text config.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.evaluate.engines.canary import fixed_tokens
from holdfast.evaluate.engines.hf.cuda_graph_replay import Replay, replay_of

_SMALL_BYTES = 256 * 1024 * 1024
"""The largest size of the parameters for which a model is replayed.

In larger models, the tensor operations themselves take most of the time.
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECORD_AT = (5, 9, 16)
_VERIFY_AT = (2, 3, 33, 64)
_VERIFY_UP_TO = 512


class Calls:
    """Call the model for one sequence; results are the same as under `torch.inference_mode`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._always: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if model._supports_logits_to_keep():
            self._always["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted

    def arguments(self, positions: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that `generate` passes besides tokens, cache and mask."""
        return (
            {**self._always, "position_ids": positions} if self._takes_positions else self._always
        )

    def scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, tokens, vocabulary] for tokens of shape [1, tokens]."""
        logits: torch.Tensor = self.model(tokens).logits
        return logits

    def read(self, prompt: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Read a prompt of shape [1, tokens]; return logits and a new cache.

        The last row of the logits predicts the next token.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        positions = torch.arange(prompt.shape[1], device=prompt.device)[None]
        return self._forward(prompt, positions, cache), cache

    def read_on(self, token: torch.Tensor, position: int, cache: Any) -> tuple[torch.Tensor, Any]:
        """Read one more token of shape [1, 1]; the cache passed in must not be used again."""
        return self._forward(token, torch.tensor([[position]], device=token.device), cache), cache

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        outputs = self.model(input_ids=tokens, past_key_values=cache, **self.arguments(positions))
        logits: torch.Tensor = outputs.logits
        return logits


class ReplayedCalls(Calls):
    """Return the same bits as `Calls`, for a small model by verified replays.

    A cache is a list of tensors here.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__(model)
        self._scores: Replay | None = None
        self._read: Replay | None = None
        self._read_on: Replay | None = None
        size_bytes = sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        )
        if size_bytes > _SMALL_BYTES or model.device.type != "cpu" or max_length <= _RECORD_AT[-1]:
            return
        verify = [
            length
            for length in (*_VERIFY_AT, min(max_length, _VERIFY_UP_TO))
            if length <= max_length
        ]
        self._scores = replay_of(
            self._recorded_scores, self._tokens, record=_RECORD_AT, verify=verify
        )
        self._read = replay_of(self._recorded_read, self._prompt, record=_RECORD_AT, verify=verify)
        verify_on = [length - 1 for length in verify]
        self._read_on = replay_of(
            self._recorded_read_on, self._next, record=_RECORD_AT, verify=verify_on
        )

    def scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Calls.scores`."""
        length = tokens.shape[1]
        if self._scores is None or length == 1:  # a forward of one token may run other operations
            return super().scores(tokens)
        return self._scores([tokens], length)[0]

    def read(self, prompt: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Calls.read`."""
        length = prompt.shape[1]
        if self._read is None or self._read_on is None or length == 1:
            logits, cache = super().read(prompt)
            return logits, _flat(cache) if self._read_on is not None else cache
        logits, *cache = self._read([prompt, torch.arange(length)[None]], length)
        return logits, cache

    def read_on(self, token: torch.Tensor, position: int, cache: Any) -> tuple[torch.Tensor, Any]:
        """See `Calls.read_on`."""
        if self._read_on is None:
            return super().read_on(token, position, cache)
        logits, *cache = self._read_on([token, torch.tensor([[position]]), *cache], position)
        return logits, cache

    # The forward passes that are recorded, and their inputs.

    def _tokens(self, length: int) -> list[torch.Tensor]:
        vocabulary = self.model.config.get_text_config().vocab_size
        return [torch.tensor([fixed_tokens(length, length, vocabulary)])]

    def _prompt(self, length: int) -> list[torch.Tensor]:
        return [*self._tokens(length), torch.arange(length)[None]]

    def _next(self, length: int) -> list[torch.Tensor]:
        _, *cache = self._recorded_read(self._prompt(length))
        return [*self._tokens(1), torch.tensor([[length]]), *cache]

    def _recorded_scores(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [Calls.scores(self, given[0])]

    def _recorded_read(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._recorded_read_on(given)

    def _recorded_read_on(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        from transformers import DynamicCache

        tokens, positions, *flat = given
        cache: Any = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        for layer, keys, values in zip(cache.layers, flat[::2], flat[1::2], strict=bool(flat)):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return [self._forward(tokens, positions, cache), *_flat(cache)]


def is_plain(model: Any) -> bool:
    """Return True if `generate` calls the model in the usual way.

    A model with its own preparation of inputs or its own cache is not called in the usual way.
    """
    from transformers.generation.utils import GenerationMixin

    own_inputs = (
        type(model).prepare_inputs_for_generation
        is not GenerationMixin.prepare_inputs_for_generation
    )
    return not own_inputs and bool(model._supports_default_dynamic_cache())


def has_plain_cache(model: Any) -> bool:
    """Return True if each layer of the cache keeps all keys and values, and no window or state."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def calls_of(model: Any, max_length: int) -> Calls:
    """Return the calls for a model in exact mode, by replays if possible."""
    text = model.config.get_text_config(decoder=True)
    # Do not replay a mixture of experts: the data decides which experts run, and a recording may
    # not notice that.
    has_experts = any(getattr(text, name, None) for name in _EXPERTS)
    if has_experts or not is_plain(model) or not has_plain_cache(model):
        return Calls(model)
    return ReplayedCalls(model, max_length)


def _flat(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
