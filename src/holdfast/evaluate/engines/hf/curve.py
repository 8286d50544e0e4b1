"""Measure the cost curve of a loaded model, and compute the model's canaries."""

import time
from collections.abc import Callable
from typing import Any

import torch

from holdfast.evaluate.engines.canary import canary_requests, fixed_tokens
from holdfast.evaluate.engines.hf.calls import Calls
from holdfast.evaluate.engines.hf.exact import input_of, score, tensor_of
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.requests import pack_tokens

_SHORT, _LONG = 16, 112  # tokens of the timed prompts
_BUDGET_S = 0.25


def canary_of(model: Any, max_length: int) -> list[float]:
    """Return the log-probabilities of the fixed prompts, each read by itself."""
    vocabulary = model.config.get_text_config().vocab_size
    found, calls = [], Calls(model)
    for request in canary_requests(vocabulary, max_length):
        (answer,) = score(calls, input_of(request, max_length), [request.continuation])
        assert answer.logprob is not None
        found.append(answer.logprob)
    return found


@torch.inference_mode()
def measure(model: Any, max_length: int, max_batch: int) -> Curve:
    """Measure a model's cost curve.

    Forward passes of two lengths give the cost of a prompt. Passes of one token, for one and for
    several sequences, give the cost of a decoding step. The measurement takes at most about 0.3 s.
    A model that is too slow for that is measured only by the forward pass of the shorter length and
    by a single token.
    """
    vocabulary = model.config.get_text_config().vocab_size
    short, long = min(_SHORT, max_length // 2), min(_LONG, max_length)
    began_s = time.monotonic()

    def seconds(rows: int, length: int) -> float:
        tokens = pack_tokens(fixed_tokens(1, length, vocabulary))
        inputs = tensor_of(tokens, model.device).expand(rows, -1)

        def run() -> None:
            model(inputs).logits[0, -1, 0].item()  # waits for the device

        return _best_s(run, began_s + _BUDGET_S)

    seconds(1, short)  # the first run is the slowest
    short_s = seconds(1, short)
    one_s = seconds(1, 1)
    is_slow = time.monotonic() - began_s > _BUDGET_S
    long_s = long * short_s / short if is_slow else seconds(1, long)
    rate = (long - short) / max(1e-9, long_s - short_s)
    several = min(8, max_batch)
    several_s = one_s if is_slow or several == 1 else seconds(several, 1)
    sequence_s = max(0.0, several_s - one_s) / max(1, several - 1)
    return Curve(
        prefill_tokens_per_s=rate,
        request_s=max(0.0, short_s - short / rate),
        step_base_s=max(0.0, one_s - sequence_s),
        step_sequence_s=sequence_s,
        max_batch=max_batch,
    )


def _best_s(run: Callable[[], None], deadline_s: float) -> float:
    """Return the shortest time of up to three runs; no further run starts after the deadline."""
    best_s = float("inf")
    for _ in range(3):
        began_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - began_s)
        if time.monotonic() > deadline_s:
            break
    return best_s
